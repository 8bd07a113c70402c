"""Local SGD and DiLoCo: replicas take their own optimizer steps and exchange parameters every ``period`` steps."""

"""Local SGD and DiLoCo: replicas of ``dp_replicate`` take their own optimizer steps and meet every ``period`` steps."""

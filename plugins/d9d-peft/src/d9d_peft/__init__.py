"""Parameter-efficient fine-tuning: what trains beside, or instead of, all parameters of a model."""

"""Parameter-efficient fine-tuning: methods that train additional parameters, or only some parameters, of a model."""

"""Third-party plugin that measures the memory of a language model: a dataset, a model, metrics and inference."""

"""Costs of fine-tuning, from the declarations of models and methods."""

"""Costs of fine-tuning, from what models and methods declare."""

"""Distillation: a model learns the next-token distribution of another model."""

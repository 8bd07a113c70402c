"""Strategies that change how a model's blocks run."""

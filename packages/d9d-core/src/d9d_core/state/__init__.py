"""Weights, checkpoints and randomness: everything that outlives a step."""

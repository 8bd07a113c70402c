"""Weights & Biases: a tracker, online or offline."""

"""Accuracy of next-token predictions."""

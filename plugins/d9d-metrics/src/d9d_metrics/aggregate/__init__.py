"""Sums, means, maxima and minima of an observation."""

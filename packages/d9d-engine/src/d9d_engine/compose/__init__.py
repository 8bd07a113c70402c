"""Composition of a trainer from a job: components, strategies, kernels, initial weights, and the plan."""

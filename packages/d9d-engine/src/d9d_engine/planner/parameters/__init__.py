"""Costs of the parameters of a model: which of them train, and what their update takes."""

"""Causal language modelling: the task, its loss term and its metric."""

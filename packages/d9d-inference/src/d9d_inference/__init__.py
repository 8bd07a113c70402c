"""Inference jobs: one pass over data, with one row of output for each row of input."""

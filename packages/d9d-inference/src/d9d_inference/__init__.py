"""Inference jobs: one pass over data, a row of output for each row of input."""

"""Joint projections: weights that read the same rows, and have one product for the gradient of these rows."""

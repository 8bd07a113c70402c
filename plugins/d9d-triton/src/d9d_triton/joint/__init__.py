"""Joint projections: several weights applied to the same rows, with one product for the gradient of these rows."""

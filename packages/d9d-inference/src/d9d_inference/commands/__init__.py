"""Commands of d9d-inference."""

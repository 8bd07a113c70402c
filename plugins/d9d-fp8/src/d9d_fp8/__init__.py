"""Training with products in float8: a strategy for linear layers and a kernel for experts."""

"""Training with matrix products in float8: a strategy for linear layers and a kernel for experts."""

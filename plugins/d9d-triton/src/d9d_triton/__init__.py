"""Triton kernels of d9d, each a backend of one op."""

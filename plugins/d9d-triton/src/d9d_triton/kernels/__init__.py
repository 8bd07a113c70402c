"""Triton functions alone; the modules above call them with tensors."""

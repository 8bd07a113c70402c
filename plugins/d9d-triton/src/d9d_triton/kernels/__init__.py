"""Triton functions; the modules of ``d9d_triton`` launch them on tensors."""

"""Backends of the op ``attention`` by the libraries of FlashAttention."""

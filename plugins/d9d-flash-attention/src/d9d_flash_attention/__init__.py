"""Backends of the op ``attention`` by the FlashAttention libraries."""

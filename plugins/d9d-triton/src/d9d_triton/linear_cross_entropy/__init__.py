"""Backends of the op ``linear_cross_entropy``."""

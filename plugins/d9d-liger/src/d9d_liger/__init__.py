"""Backends of ops by the library Liger-Kernel."""

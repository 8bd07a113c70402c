"""Runs that exist, and sweeps that make several of them."""

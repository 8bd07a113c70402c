"""Rotary position embeddings and their scaling."""

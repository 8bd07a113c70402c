"""Subscribers of the engine itself."""

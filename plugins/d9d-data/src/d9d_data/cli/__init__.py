"""Command ``d9d data``."""

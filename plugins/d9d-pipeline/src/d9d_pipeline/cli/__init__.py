"""Command ``d9d pipeline``."""

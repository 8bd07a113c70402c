"""Command ``d9d lr``."""

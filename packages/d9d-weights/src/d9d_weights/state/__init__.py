"""Command ``d9d state``."""

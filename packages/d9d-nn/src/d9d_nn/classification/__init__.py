"""Sorting samples into classes: the task ``classification``."""

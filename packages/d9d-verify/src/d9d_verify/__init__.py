"""Verification that a layout computes the same as a single process: ``d9d verify``."""

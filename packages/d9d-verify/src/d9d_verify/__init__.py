"""Verification that a layout computes what one process computes: ``d9d verify``."""

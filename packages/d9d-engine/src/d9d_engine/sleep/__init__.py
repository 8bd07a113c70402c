"""Temporary release of a trainer's device memory."""

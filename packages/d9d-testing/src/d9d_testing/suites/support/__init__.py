"""Helpers shared by several suites, and functions for worlds' ranks."""

"""Helpers that several suites share, and functions that their ranks run."""

"""Helpers shared by several suites, and functions that the ranks of a world run."""

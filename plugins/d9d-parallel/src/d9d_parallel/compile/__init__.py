"""Compilation of blocks."""

"""Compiling blocks."""

"""Printing on a terminal with control characters escaped."""

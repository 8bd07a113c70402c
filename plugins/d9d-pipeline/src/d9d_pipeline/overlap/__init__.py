"""Overlapped pairs: a forward and a backward of two stages at the same time."""

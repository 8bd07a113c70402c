"""Overlapped pairs: a forward and a backward of two stages, run at the same time."""

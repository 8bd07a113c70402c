"""Simulator of programs: times, bubbles and memory of a step, without a GPU."""

"""Planner: predicts memory and time of a job on a mesh, and searches for the fastest layout that fits."""

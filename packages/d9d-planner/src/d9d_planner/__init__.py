"""Planner: predicted memory and time of a job on a mesh, and the search for the layout that fits and is fastest."""

"""Launcher of a job's processes on one machine, and the side of the started processes."""

"""Launcher of a job's processes on one machine, and the code that runs in the launched processes."""

"""Launcher of a job's processes on one machine, and the launched processes' side."""

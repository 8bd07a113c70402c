"""Profiling of training steps: traces, memory snapshots, and a table of time by kind of work."""

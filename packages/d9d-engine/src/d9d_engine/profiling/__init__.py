"""Profiling of training steps: traces, memory snapshots, and a table of the time by kind."""

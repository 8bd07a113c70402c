"""Schedules: pure functions from ranks and microbatches to programs."""

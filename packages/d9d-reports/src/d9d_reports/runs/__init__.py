"""Existing runs, and sweeps over several runs."""

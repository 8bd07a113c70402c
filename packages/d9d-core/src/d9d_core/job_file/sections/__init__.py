"""Sections of the job file that depend on no other section."""

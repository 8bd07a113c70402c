"""Instantiation of a job's components, and checks against their protocols."""

"""Conformance suites of inference jobs: tasks and writers."""

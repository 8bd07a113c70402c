"""Conformance suites, one per extension point: subclass one in a test file and name what it is about."""

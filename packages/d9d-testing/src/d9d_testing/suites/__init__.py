"""Conformance suites, one per extension point: subclass a suite in a test file and set its target."""

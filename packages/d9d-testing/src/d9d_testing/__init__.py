"""Test tools of d9d, also for plugins: registry fixture, conformance suites, tolerances, worlds of processes."""

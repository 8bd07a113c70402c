"""What d9d tests its own plugins with: registry fixture, conformance suites, tolerances, gloo worlds."""

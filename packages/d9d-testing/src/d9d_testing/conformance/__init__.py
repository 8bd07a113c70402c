"""``d9d plugins conform``: runs the conformance suites that fit the components of an installed distribution."""

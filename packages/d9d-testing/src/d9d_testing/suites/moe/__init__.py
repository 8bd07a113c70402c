"""Conformance suites of routers and dispatchers; they need ``d9d-testing[moe]``."""

"""Suites of what brings tokens to experts; they need ``d9d-testing[moe]``."""

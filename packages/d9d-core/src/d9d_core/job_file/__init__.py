"""Reads and validates job files, resolves their names to plugins, and generates their JSON schema."""

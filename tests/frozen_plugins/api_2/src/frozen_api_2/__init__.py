"""A plugin for API 2 of d9d, never changed: see the README in the directory of frozen plugins."""

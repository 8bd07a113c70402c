"""Skeletons of plugin packages, for ``d9d new plugin``."""

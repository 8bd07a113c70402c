"""Command ``d9d state``, which shows, converts and compares model weights."""

"""Built-in trackers: console and JSON lines."""

"""Built-in subscribers."""

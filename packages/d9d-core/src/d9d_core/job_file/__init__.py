"""Job file: reading, names resolved to plugins, validation, schema."""

"""Files and directories that are there whole or not at all, local or behind fsspec."""

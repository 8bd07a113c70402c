"""Files and directories that are complete or absent, local or behind fsspec."""

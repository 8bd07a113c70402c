"""Files and directories that are either complete or absent, local or at fsspec addresses."""

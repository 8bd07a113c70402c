"""Reading of documents and records from source files: texts, tables and JSON, local or at fsspec addresses."""

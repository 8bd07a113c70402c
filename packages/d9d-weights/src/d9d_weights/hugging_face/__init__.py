"""Models in Hugging Face layout on disk: read by windows, written file by file."""

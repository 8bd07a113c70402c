"""Models in Hugging Face layout: read by windows, written file by file."""

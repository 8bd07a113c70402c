"""Text files to tokens to packed, resumable training samples."""

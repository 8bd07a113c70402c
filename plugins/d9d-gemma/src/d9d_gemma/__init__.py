"""Gemma 2 and Gemma 3 models, and their Hugging Face layout."""

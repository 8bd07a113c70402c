"""Qwen3-Next and Qwen3.5 models, and their Hugging Face layout."""

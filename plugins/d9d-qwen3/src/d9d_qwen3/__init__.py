"""Qwen3 models, dense and with experts, and their Hugging Face layout."""

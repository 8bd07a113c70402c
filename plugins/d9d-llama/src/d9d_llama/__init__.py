"""Llama, Mistral and Qwen2 models, and their Hugging Face layout."""

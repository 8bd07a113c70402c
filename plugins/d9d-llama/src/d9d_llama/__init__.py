"""Llama, Mistral, Qwen2 and GLM models, and their Hugging Face layout."""

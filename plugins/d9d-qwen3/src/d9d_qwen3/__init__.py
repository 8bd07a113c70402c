"""Qwen3 models with Hugging Face mappings."""

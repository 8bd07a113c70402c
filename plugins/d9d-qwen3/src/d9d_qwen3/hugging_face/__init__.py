"""Qwen3 models in Hugging Face layout: ``config.json`` and parameter names of transformers."""

"""Decoder language models of Hugging Face transformers, in every parallel layout."""

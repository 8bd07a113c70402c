"""DeepSeek-V3 models and their Hugging Face layout."""

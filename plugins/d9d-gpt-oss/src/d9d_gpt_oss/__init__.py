"""gpt-oss models, and their Hugging Face layout."""

"""Decoders of language models: parts shared by dense models and by models with experts."""

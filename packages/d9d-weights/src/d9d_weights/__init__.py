"""Streaming of model weights: state graphs, Hugging Face files, sharded loading and saving."""

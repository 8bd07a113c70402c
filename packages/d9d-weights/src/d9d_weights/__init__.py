"""State graphs and streaming of model weights between Hugging Face or safetensors files and sharded models."""

"""State graphs and streaming of model weights: Hugging Face and safetensors files, into any sharding and out of it."""

"""Text generation: with transformers from an export, and with a decoder for the model in training."""

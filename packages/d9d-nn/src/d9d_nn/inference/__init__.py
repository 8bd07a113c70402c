"""Inference tasks: log-probabilities, generations, classes, rewards, embeddings and hidden states."""

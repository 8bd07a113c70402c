"""Inference tasks: log-probabilities, classes, rewards, embeddings and hidden states."""

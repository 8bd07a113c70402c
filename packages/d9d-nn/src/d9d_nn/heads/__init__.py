"""What a model computes from its hidden states: token losses, classes, embeddings."""

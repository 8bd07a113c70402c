"""Heads, which compute token losses, classes or embeddings from a model's hidden states."""

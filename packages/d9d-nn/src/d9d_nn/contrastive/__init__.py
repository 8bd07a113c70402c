"""Contrastive training of embedding models: the task ``embedding`` and its loss."""

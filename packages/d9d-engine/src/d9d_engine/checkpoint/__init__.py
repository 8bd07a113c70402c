"""Training checkpoints: written by all ranks, loaded into any layout."""

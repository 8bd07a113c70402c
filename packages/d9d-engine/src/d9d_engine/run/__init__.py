"""Training loop: trainer, prefetching, evaluation, logging, checkpointing."""

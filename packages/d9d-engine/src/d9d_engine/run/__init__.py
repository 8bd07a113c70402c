"""The loop over steps: trainer, prefetching, evaluation, logging, checkpointing."""

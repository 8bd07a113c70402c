"""One optimizer step, from microbatches to updated parameters."""

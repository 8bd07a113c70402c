"""Order of samples, and their division over packs, ranks and microbatches."""

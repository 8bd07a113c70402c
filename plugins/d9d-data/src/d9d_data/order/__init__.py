"""Order of samples, and their division over packs (the samples of a step), ranks and microbatches."""

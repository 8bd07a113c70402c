"""Resumable streams over a corpus, which give the microbatches of each step (a pack)."""

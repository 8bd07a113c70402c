"""Training loop of d9d: builds and runs jobs, saves checkpoints, and launches and supervises processes."""

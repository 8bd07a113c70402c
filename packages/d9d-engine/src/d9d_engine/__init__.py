"""Training loop of d9d: build, step, run, checkpoints, process groups, supervision, launch, verify."""

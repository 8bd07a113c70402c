"""The training loop: how a step runs, how a job is built, what is logged and saved."""

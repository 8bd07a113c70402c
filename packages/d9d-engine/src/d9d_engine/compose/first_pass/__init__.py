"""First pass: a forward over each step's microbatches, by the trained or a frozen model, whose outputs a loss needs."""

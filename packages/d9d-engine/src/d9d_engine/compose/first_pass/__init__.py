"""First forward over each step's microbatches, by the trained or a frozen model; a task's loss needs its outputs."""

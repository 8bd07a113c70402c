"""Learning-rate schedules: pure functions from the step to a factor on the base learning rate."""

"""First pass of a task over each pack, with the trained model or with a frozen model."""

"""First pass of a task over each pack: by the model itself, or by a frozen one."""

"""Ray: the launcher of `d9d launch` that trains with Ray Train."""

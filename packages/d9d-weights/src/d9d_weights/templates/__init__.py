"""Chat templates of published models: rendered in a process of their own, with bounds on time and memory."""

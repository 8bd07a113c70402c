"""Chat templates of published models, rendered in a separate process with limits on time and memory."""

"""Top-k router, its routing of tokens to experts, and the metric ``router``."""

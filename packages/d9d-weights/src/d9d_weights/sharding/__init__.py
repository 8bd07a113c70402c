"""Local shards of tensors on several ranks, and agreement between these ranks."""

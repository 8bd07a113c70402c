"""Local shards of tensors, and communication between the ranks that hold them."""

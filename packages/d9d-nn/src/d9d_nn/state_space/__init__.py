"""State-space models: token mixers whose state per head has one size for all lengths."""

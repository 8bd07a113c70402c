"""State-space models: token mixers with a state per head, whose size does not depend on the sequence length."""

"""Gated DeltaNet: a token mixer with a state per head, whose size does not depend on the sequence length."""

"""Gated DeltaNet: a token mixer whose state per head has one size for all lengths."""

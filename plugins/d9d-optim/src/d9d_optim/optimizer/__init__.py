"""Optimizers with state by parameter name, whose steps can be skipped by a flag on the device (gated)."""

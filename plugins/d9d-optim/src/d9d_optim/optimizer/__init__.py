"""Optimizers whose optimizer state is keyed by parameter name and whose steps can be gated on the device."""

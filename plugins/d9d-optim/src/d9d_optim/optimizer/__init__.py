"""Optimizers with state by parameter name, whose steps can be gated on the device."""

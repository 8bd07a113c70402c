"""Measurement of collectives between the devices of this machine."""

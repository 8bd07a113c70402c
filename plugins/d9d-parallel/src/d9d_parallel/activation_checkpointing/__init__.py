"""Activation checkpointing: a second forward of blocks in place of stored activations."""

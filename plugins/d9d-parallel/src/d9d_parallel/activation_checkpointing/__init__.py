"""Activation checkpointing: a second forward of blocks in the backward instead of stored activations."""

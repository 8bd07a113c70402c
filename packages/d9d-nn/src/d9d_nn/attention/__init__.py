"""Attention layers and the cores they call."""

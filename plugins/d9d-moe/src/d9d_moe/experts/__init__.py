"""Experts of a layer, and the layer that consists of router, dispatcher and experts."""

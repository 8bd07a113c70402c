"""Experts of a layer, and the layer made of router, dispatcher and experts."""

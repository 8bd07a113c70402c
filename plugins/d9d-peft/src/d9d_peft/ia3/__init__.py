"""Learned scales of activations; written like a method of another package, so it imports only public protocols."""

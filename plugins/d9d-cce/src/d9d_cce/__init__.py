"""Backends of the op ``linear_cross_entropy`` by the library cut-cross-entropy."""

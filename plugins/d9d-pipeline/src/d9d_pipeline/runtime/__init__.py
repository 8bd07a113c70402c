"""Handlers of the actions of a pipeline program: transfers, split backwards and overlapped pairs."""

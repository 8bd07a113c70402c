"""Strategies of data, tensor and context parallelism, of activation checkpointing and of compilation."""

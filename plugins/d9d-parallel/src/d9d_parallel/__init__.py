"""Strategies of data parallelism, activation checkpointing and compilation."""

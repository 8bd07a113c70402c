"""Tokens reach experts on other GPUs through the library DeepEP."""

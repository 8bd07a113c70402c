"""Dispatch of tokens to experts on other GPUs by the library DeepEP."""

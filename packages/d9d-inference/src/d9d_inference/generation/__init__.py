"""Texts from models: generation with transformers from an export, and a decoder over the model in training."""

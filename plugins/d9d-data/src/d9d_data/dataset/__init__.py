"""Datasets that a function of the user makes: any map-style dataset of PyTorch or Hugging Face."""

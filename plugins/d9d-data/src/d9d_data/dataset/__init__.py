"""Map-style datasets of PyTorch or Hugging Face, made by a function of the user."""

"""Decoders of language models: parts that the families of dense models and of models with experts are made of."""

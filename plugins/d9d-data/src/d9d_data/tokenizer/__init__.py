"""Tokenizers of texts: byte-level, trained on the corpus, or from a ``tokenizer.json``."""

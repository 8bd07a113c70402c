"""Prepared corpus: documents tokenised once, and cached on disk."""

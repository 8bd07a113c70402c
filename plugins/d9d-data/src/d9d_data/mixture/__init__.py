"""Mixtures of datasets in exact proportions."""

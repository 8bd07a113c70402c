"""Evaluation of trained models on whole datasets, and comparison of two models."""

"""Evaluation of trained models: losses and metrics over whole datasets, and comparison of two models."""

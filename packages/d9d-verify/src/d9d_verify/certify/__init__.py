"""Certificates: lists of the layouts and features in which a model computes the same as in one process."""

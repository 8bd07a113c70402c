"""Metrics of a confusion matrix: accuracy, precision, recall, F-beta, or a function of the counts."""

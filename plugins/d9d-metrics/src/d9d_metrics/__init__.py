"""Metrics of task observations: sums, means, confusion matrices, AUROC and token accuracy."""

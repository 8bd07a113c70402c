"""Metrics over what tasks observe: sums, means, confusion matrices, AUROC and token accuracy."""

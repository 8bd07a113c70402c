"""Ops, the operations worth a custom kernel: readable PyTorch references, and backends."""

"""Kubernetes: the launcher of `d9d launch` that submits with kubectl."""

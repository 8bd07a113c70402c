"""Costs of blocks and updates under a job's strategies and optimizer."""

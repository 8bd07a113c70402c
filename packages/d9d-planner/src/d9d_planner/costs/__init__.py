"""Costs of blocks and of updates as the fine-tuning method, the strategies and the optimizer of a job change them."""

"""Failures and hangs of ranks: noticed, explained, told once."""

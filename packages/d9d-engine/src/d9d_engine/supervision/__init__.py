"""Supervision of ranks: failures and hangs are noticed, explained, and reported once."""

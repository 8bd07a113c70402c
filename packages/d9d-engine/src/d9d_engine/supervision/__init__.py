"""Supervision of ranks: detection of failures and hangs, and one report of the cause."""

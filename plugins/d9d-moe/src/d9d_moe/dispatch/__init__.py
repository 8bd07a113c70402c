"""Dispatch of tokens to experts of the same process, and parts shared by all dispatchers."""

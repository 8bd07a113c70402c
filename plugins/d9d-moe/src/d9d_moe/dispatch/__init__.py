"""Dispatch of tokens to experts of the same process, and the parts that all dispatchers share."""

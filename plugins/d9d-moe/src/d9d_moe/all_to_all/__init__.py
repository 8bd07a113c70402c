"""Dispatch of tokens to experts on other ranks by all-to-all."""

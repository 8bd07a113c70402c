"""Hostile input: hypothesis strategies for malicious files, and a judge of the effects of reading them."""

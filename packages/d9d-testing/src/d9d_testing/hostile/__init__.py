"""Hostile input: hypothesis strategies for files that were made to harm, and a judge of what reading them does."""

"""Keeping experts equally busy: loss terms of a router, and a bias that follows the load."""

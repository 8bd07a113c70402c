"""Load balancing of experts: loss terms of a router, and a bias that follows the load."""

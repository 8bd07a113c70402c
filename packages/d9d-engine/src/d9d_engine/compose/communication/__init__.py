"""Placements and collectives of a job, as shown by ``d9d explain``."""

"""Certificates: which layouts and features compute the same for one model."""

"""Low-rank adaptation."""

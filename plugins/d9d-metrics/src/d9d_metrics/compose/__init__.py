"""Several metrics under one name."""

"""Trading memory for a second forward of blocks."""

"""Writers of the output of inference jobs."""

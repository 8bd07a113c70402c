"""Classification of samples: the task ``classification``."""

"""Parts of a run that sections of the job ask for: data, length, metrics, evaluation."""

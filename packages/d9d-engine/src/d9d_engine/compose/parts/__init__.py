"""Components of a run for sections of the job: data, steps, metrics, evaluation."""

"""Builders of a run's components from sections of the job: data, number of steps, metrics, evaluation."""

"""Command ``d9d data``, which shows the samples of a job."""

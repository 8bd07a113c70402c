"""From a job to a trainer."""

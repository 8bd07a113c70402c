"""Command ``d9d lr``, which shows the learning rate of a job."""

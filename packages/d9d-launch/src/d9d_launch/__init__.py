"""Submission of jobs to engines such as Slurm."""

"""The processes of a job and how they are arranged."""

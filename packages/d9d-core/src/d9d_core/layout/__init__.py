"""Layout of a job: mesh, strategies, pipeline schedule and batch, and whether they fit together and the processes."""

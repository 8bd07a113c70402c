"""Layout of a job (mesh, strategies, pipeline schedule, batch), and checks that it fits the number of processes."""

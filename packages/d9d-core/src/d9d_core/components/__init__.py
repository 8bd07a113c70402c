"""Components of a job: built from their records, and compared with their protocols."""

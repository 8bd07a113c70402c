"""Job files that are written from a model and records: ``d9d new job``."""

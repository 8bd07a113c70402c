"""MLflow: a tracker with a local or a remote store."""

"""Data parallelism: replicas and shards of the model over ranks that see different samples."""

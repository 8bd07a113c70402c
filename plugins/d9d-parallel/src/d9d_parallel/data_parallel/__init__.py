"""Data parallelism: replicas and shards of the model over ranks that read different samples."""

"""Expert parallelism: the experts of every layer are sharded over the ranks of ``ep``."""

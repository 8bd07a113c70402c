"""Checkpoints of training, read: manifest, tensors, and the model that a checkpoint is of."""

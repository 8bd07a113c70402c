"""Reading of training checkpoints: manifest, tensors, and the config of the model."""

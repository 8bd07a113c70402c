"""Fine-tuning method with learned scales of activations; an example for other packages, with only public imports."""

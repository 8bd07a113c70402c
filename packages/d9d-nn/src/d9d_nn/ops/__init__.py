"""The few operations worth a custom kernel; each file holds one's readable PyTorch reference, or a backend of it."""

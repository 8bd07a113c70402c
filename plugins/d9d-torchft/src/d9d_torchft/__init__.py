"""Elastic replicas: whole runs in worlds of their own that share each step, coordinated by torchft's lighthouse."""

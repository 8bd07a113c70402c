"""Processes of a job: device, meshes, process groups."""

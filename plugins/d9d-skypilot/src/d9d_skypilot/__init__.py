"""SkyPilot: the launcher of `d9d launch` that submits managed jobs to clouds and clusters with `sky`."""

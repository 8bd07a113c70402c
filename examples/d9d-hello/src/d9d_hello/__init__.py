"""Example of a third-party plugin with a task and a tracker. Copy this directory to start your own plugin."""

"""Third-party plugin. Copy this directory to start your own."""

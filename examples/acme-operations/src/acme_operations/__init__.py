"""Components for people who run jobs. An example of a third-party plugin."""

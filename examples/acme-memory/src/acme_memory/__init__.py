"""How far back a language model remembers: data, a model and measurements. An example of a third-party plugin."""

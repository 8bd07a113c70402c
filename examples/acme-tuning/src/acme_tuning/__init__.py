"""Components that change how a model trains. An example of a third-party plugin."""

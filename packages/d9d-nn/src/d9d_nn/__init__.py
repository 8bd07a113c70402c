"""Building blocks for models, the ops they are made of, and the tasks that train language models."""

"""Building blocks of models, the ops that they use, and the tasks that train language models."""

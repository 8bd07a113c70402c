"""Building blocks for models, the ops they are made of, and the causal language modelling task."""

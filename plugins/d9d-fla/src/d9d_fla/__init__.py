"""Backend of the op ``gated_delta_rule`` by the library flash-linear-attention."""

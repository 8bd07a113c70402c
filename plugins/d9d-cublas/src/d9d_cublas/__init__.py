"""Backend of the op ``swiglu`` whose products run the cuBLASLt algorithms that were measured to be fastest."""

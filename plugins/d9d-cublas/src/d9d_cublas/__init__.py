"""Backend of the op ``swiglu`` whose matrix products use the fastest cuBLASLt algorithms by measurement."""

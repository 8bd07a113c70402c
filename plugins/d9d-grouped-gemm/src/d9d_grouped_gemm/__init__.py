"""Backend of the op ``grouped_linear`` by the library grouped_gemm."""

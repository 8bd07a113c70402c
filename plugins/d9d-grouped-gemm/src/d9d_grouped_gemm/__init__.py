"""The library grouped_gemm as a backend of the op grouped_linear."""

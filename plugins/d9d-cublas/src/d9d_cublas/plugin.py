"""Plugin declaration of the cuBLASLt backend."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the backend ``cublas`` of the op ``swiglu``."""
    yield KernelSpec(
        name="cublas",
        summary="SwiGLU layer whose matrix products use the fastest cuBLASLt algorithms by measurement.",
        op="swiglu",
        supports=Ref("d9d_cublas.rules:swiglu"),
        build=Ref("d9d_cublas.swiglu:build"),
        requires=frozenset({"import:triton"}),
    )

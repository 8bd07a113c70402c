"""Plugin declaration of a backend of ``grouped_linear``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the backend ``grouped_gemm`` of the op ``grouped_linear``."""
    yield KernelSpec(
        name="grouped_gemm",
        summary="The library grouped_gemm: CUDA, bfloat16; the host reads the counts. Never chosen by itself.",
        op="grouped_linear",
        supports=Ref("d9d_grouped_gemm.linear:supports"),
        build=Ref("d9d_grouped_gemm.linear:build"),
        requires=frozenset({"import:grouped_gemm"}),
    )

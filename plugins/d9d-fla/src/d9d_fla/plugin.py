"""Plugin declaration of the backend by flash-linear-attention."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the backend ``fla`` of ``gated_delta_rule``."""
    yield KernelSpec(
        name="fla",
        summary="Gated delta rule of flash-linear-attention, in Triton: CUDA, bfloat16 and float16.",
        op="gated_delta_rule",
        supports=Ref("d9d_fla.rules:gated_delta_rule"),
        build=Ref("d9d_fla.gated_delta_rule:build"),
        requires=frozenset({"import:fla"}),
        deterministic=False,  # autotuning chooses tiles by their measured times, so sums are added in varying order
    )

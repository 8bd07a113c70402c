"""Plugin declaration of the cut-cross-entropy backends."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the backends of ``linear_cross_entropy``: ``cce`` is exact, ``cce_filtered`` skips small gradients."""
    for name, suffix, summary in (
        ("cce", "", "cut-cross-entropy: no logits in memory; all gradients, summed in 16 bits."),
        ("cce_filtered", "_filtered", "cut-cross-entropy with its gradient filter, which skips small gradients."),
    ):
        yield KernelSpec(
            name=name,
            summary=f"{summary} Never chosen by itself.",
            op="linear_cross_entropy",
            supports=Ref(f"d9d_cce.rules:supports{suffix}"),
            build=Ref(f"d9d_cce.backend:build{suffix}"),
            requires=frozenset({"import:cut_cross_entropy"}),
            deterministic=False,  # Triton programs add to the gradients in arbitrary order
        )

"""Declaration of the Triton kernels."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 1

_TRITON = frozenset({"import:triton"})


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Backends ``triton`` of ops, and variants of them."""
    yield KernelSpec(
        name="triton",
        summary="Two passes over the logits, which become their gradient in their place; exact.",
        op="linear_cross_entropy",
        supports=Ref("d9d_triton.support:linear_cross_entropy"),
        build=Ref("d9d_triton.linear_cross_entropy.backend:build"),
        requires=_TRITON,
    )
    yield KernelSpec(
        name="triton_sum",
        summary="The same for losses without weights, in memory for one chunk of logits; never chosen by itself.",
        op="linear_cross_entropy",
        supports=Ref("d9d_triton.support:linear_cross_entropy_sum"),
        build=Ref("d9d_triton.linear_cross_entropy.backend:build_sum"),
        requires=_TRITON,
    )
    yield KernelSpec(
        name="triton",
        summary="AdamW in one launch for all tensors of a group: each byte is read and written once.",
        op="adamw",
        supports=Ref("d9d_triton.support:adamw"),
        build=Ref("d9d_triton.adamw:build"),
        requires=_TRITON,
    )
    yield KernelSpec(
        name="triton",
        summary="AdamW with stochastic rounding in one launch for all tensors of a group.",
        op="stochastic_adamw",
        supports=Ref("d9d_triton.support:stochastic_adamw"),
        build=Ref("d9d_triton.adamw:build_stochastic"),
        requires=_TRITON,
    )

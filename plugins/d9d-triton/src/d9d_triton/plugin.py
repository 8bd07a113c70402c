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
        supports=Ref("d9d_triton.linear_cross_entropy.backend:supports"),
        build=Ref("d9d_triton.linear_cross_entropy.backend:build"),
        requires=_TRITON,
    )
    yield KernelSpec(
        name="triton_sum",
        summary="The same for losses without weights, in memory for one chunk of logits; never chosen by itself.",
        op="linear_cross_entropy",
        supports=Ref("d9d_triton.linear_cross_entropy.backend:supports_sum"),
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
    for op, supports, summary in (
        ("rms_norm", "rms_norm", "RMSNorm in one pass each way; by itself on CUDA where nothing compiles it."),
        ("silu_mul", "by_rule", "Gate of SwiGLU in one pass each way; by itself on CUDA where nothing compiles it."),
        (
            "rope",
            "by_rule",
            "Rotations of queries and keys in one launch; by itself on CUDA where nothing compiles it.",
        ),
    ):
        yield KernelSpec(
            name="triton",
            summary=summary,
            op=op,
            supports=Ref(f"d9d_triton.rules:{supports}"),
            build=Ref(f"d9d_triton.{op}:build"),
            requires=_TRITON,
        )
    for op, summary in (
        ("permute", "Copies of tokens for their experts; by itself on CUDA where nothing compiles it."),
        ("unpermute", "Weighted sums of experts' rows in one pass; by itself on CUDA where nothing compiles it."),
    ):
        yield KernelSpec(
            name="triton",
            summary=summary,
            op=op,
            supports=Ref("d9d_triton.rules:by_rule"),
            build=Ref(f"d9d_triton.permutation:build_{op}"),
            requires=_TRITON,
        )

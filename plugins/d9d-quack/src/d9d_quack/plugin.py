"""Plugin declaration of the QuACK backends."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, hookimpl

D9D_API = 2


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare backends named ``quack`` of ``rms_norm``, ``swiglu`` and ``grouped_linear``."""
    yield KernelSpec(
        name="quack",
        summary="RMSNorm of QuACK, in the CuTe DSL: Hopper and Blackwell. Never chosen by itself.",
        op="rms_norm",
        supports=Ref("d9d_quack.rules:rms_norm"),
        build=Ref("d9d_quack.rms_norm:build"),
        requires=frozenset({"import:quack"}),
    )
    yield KernelSpec(
        name="quack",
        summary="SwiGLU layer of QuACK, with the gate computed in the products: Hopper and Blackwell. Only by name.",
        op="swiglu",
        supports=Ref("d9d_quack.rules:swiglu"),
        build=Ref("d9d_quack.swiglu:build"),
        requires=frozenset({"import:quack"}),
    )
    yield KernelSpec(
        name="quack",
        summary="Products of experts by QuACK, in one launch each: Hopper and Blackwell.",
        op="grouped_linear",
        supports=Ref("d9d_quack.rules:grouped_linear"),
        build=Ref("d9d_quack.grouped_linear:build"),
        requires=frozenset({"import:quack"}),
        operators=("d9d_quack.grouped_linear",),
    )

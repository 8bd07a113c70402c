"""Plugin declaration of the strategy ``fp8`` and of backends of ``grouped_linear``."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import KernelSpec, Ref, StrategySpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Declare the strategy ``fp8``, which acts after fine-tuning methods, before blocks are wrapped or compiled."""
    yield StrategySpec(
        name="fp8",
        summary="Computes the products of linear layers in float8; weights keep the dtype of the parameters.",
        config=Ref("d9d_fp8.config:Fp8Config"),
        build=Ref("d9d_fp8.strategy:Fp8"),
        requires=frozenset({"model:blocks"}),
        anchor="convert",
    )


@hookimpl
def d9d_kernels() -> Iterator[KernelSpec]:
    """Declare the backends of ``grouped_linear`` (products of experts), which are used only if a job names them."""
    for name, function, summary in (
        ("fp8", "grouped", "float8, one scale per row, weight gradients in bfloat16; CUDA. Never chosen by itself."),
        (
            "fp8_emulated",
            "emulated",
            "Rounds as fp8, multiplies in float32, on any device. Never chosen by itself.",
        ),
    ):
        yield KernelSpec(
            name=name,
            summary=summary,
            op="grouped_linear",
            supports=Ref(f"d9d_fp8.grouped:supports_{function}"),
            build=Ref(f"d9d_fp8.grouped:build_{function}"),
            operators=("d9d_fp8.scaled_grouped_mm",) if name == "fp8" else (),
        )

"""What d9d-parallel offers."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, StrategySpec, hookimpl

D9D_API = 1


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """What is applied to a built model, selected by ``parallel``."""
    yield StrategySpec(
        name="activation_checkpointing",
        summary="Keeps only the inputs of blocks and computes the rest again in the backward: less memory, more time.",
        config=Ref("d9d_parallel.activation_checkpointing.config:ActivationCheckpointingConfig"),
        build=Ref("d9d_parallel.activation_checkpointing.strategy:ActivationCheckpointing"),
        requires=frozenset({"model:blocks"}),
        anchor="checkpointing",
    )
    yield StrategySpec(
        name="compile",
        summary="Compiles each block with torch.compile.",
        config=Ref("d9d_parallel.compile.config:CompileConfig"),
        build=Ref("d9d_parallel.compile.strategy:Compile"),
        requires=frozenset({"model:blocks"}),
        anchor="compile",
    )

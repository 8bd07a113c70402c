"""Declaration of the strategies."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, StrategySpec, hookimpl

D9D_API = 2

#: Data-parallel strategies; at most one of them acts on a module.
_DATA_PARALLEL = {"replicate", "fsdp", "hsdp"}


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Strategies, selected by ``parallel``."""
    yield StrategySpec(
        name="activation_checkpointing",
        summary="Stores only the inputs of blocks and recomputes the rest in the backward: less memory, more time.",
        config=Ref("d9d_parallel.activation_checkpointing.config:ActivationCheckpointingConfig"),
        build=Ref("d9d_parallel.activation_checkpointing.strategy:ActivationCheckpointing"),
        cost=Ref("d9d_parallel.costs:checkpointed"),
        requires=frozenset({"model:blocks"}),
        anchor="checkpointing",
    )
    yield StrategySpec(
        name="compile",
        summary="Compiles each block with torch.compile.",
        config=Ref("d9d_parallel.compile.config:CompileConfig"),
        build=Ref("d9d_parallel.compile.strategy:Compile"),
        cost=Ref("d9d_parallel.costs:compiled"),
        requires=frozenset({"model:blocks"}),
        anchor="compile",
    )
    yield StrategySpec(
        name="tensor_parallel",
        summary="Splits attention, feed-forward and vocabulary over tp, and positions in the layers between them.",
        config=Ref("d9d_parallel.tensor_parallel.config:TensorParallelConfig"),
        build=Ref("d9d_parallel.tensor_parallel.strategy:TensorParallel"),
        cost=Ref("d9d_parallel.costs:tensor_parallel"),
        requires=frozenset({"model:tensor_parallel"}),
        anchor="tensor",
        axes=frozenset({"tp"}),
    )
    yield StrategySpec(
        name="context_parallel",
        summary="Splits the positions of each sample over cp: activation memory shrinks with the number of ranks.",
        config=Ref("d9d_parallel.context_parallel.config:ContextParallelConfig"),
        build=Ref("d9d_parallel.context_parallel.strategy:ContextParallel"),
        cost=Ref("d9d_parallel.context_parallel.costs:context_parallel"),
        alternatives=Ref("d9d_parallel.context_parallel.costs:alternatives"),
        requires=frozenset({"model:context_parallel"}),
        anchor="context",
        axes=frozenset({"cp"}),
    )
    for name, axes, summary in (
        ("replicate", ("dp_replicate",), "The whole model on every rank; gradients are summed."),
        ("fsdp", ("dp_shard",), "Shards parameters, gradients and optimizer state over ranks (FSDP2)."),
        ("hsdp", ("dp_replicate", "dp_shard"), "Replicas of a sharded model (FSDP2)."),
    ):
        yield StrategySpec(
            name=name,
            summary=summary,
            config=Ref(f"d9d_parallel.data_parallel.config:{name.capitalize()}Config"),
            build=Ref(f"d9d_parallel.data_parallel.strategy:{name.capitalize()}"),
            cost=Ref(f"d9d_parallel.costs:{'replicated' if name == 'replicate' else 'sharded'}"),
            alternatives=Ref("d9d_parallel.costs:alternatives"),
            conflicts=frozenset({f"strategy:{other}" for other in _DATA_PARALLEL - {name}}),
            anchor="data",
            axes=frozenset(axes),
        )

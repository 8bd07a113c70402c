"""Declaration of the strategies."""

from __future__ import annotations

from collections.abc import Iterator

from d9d_core.plugin import Ref, StrategySpec, hookimpl

D9D_API = 2

#: Strategies that reduce or exchange data over replicas in every step.
_SYNCHRONOUS = {"replicate", "hsdp", "expert_parallel"}
_OWN = {"local_sgd", "diloco"}


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    """Declare the strategies ``local_sgd`` and ``diloco``."""
    for name, build, summary in (
        ("local_sgd", "LocalSgd", "Replicas take their own optimizer steps; parameters are averaged every few steps."),
        ("diloco", "DiLoCo", "Replicas take their own optimizer steps; an outer optimizer applies their mean change."),
    ):
        yield StrategySpec(
            name=name,
            summary=summary,
            config=Ref(f"d9d_local_sgd.config:{build}Config"),
            build=Ref(f"d9d_local_sgd.strategy:{build}"),
            cost=Ref("d9d_local_sgd.costs:cost"),
            conflicts=frozenset({f"strategy:{other}" for other in (_SYNCHRONOUS | _OWN) - {name}}),
            anchor="data",
            position="after",
            axes=frozenset({"dp_replicate"}),
            alters_training=True,
        )

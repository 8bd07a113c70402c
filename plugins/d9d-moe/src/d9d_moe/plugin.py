"""Declaration of the strategy ``expert_parallel`` and the metric ``router``.

MoE layers are not declared, because the code of models builds them.
"""

from __future__ import annotations

from collections.abc import Iterable

from d9d_core.plugin import MetricSpec, Ref, StrategySpec, hookimpl

D9D_API = 2


@hookimpl
def d9d_strategies() -> Iterable[StrategySpec]:
    """Declare the strategy ``expert_parallel``, which a job selects in ``parallel``."""
    yield StrategySpec(
        name="expert_parallel",
        summary="Shards the experts of every layer over ranks; tokens are sent to them by all-to-all.",
        config=Ref("d9d_moe.expert_parallel.config:ExpertParallelConfig"),
        build=Ref("d9d_moe.expert_parallel.strategy:ExpertParallel"),
        requires=frozenset({"model:experts"}),
        anchor="expert",
        axes=frozenset({"ep"}),
    )


@hookimpl
def d9d_metrics() -> Iterable[MetricSpec]:
    """Declare the metric ``router``, which a job selects in ``metrics``."""
    yield MetricSpec(
        name="router",
        summary="How evenly routers use their experts: entropy, violation, dropped tokens, and the load as a picture.",
        config=Ref("d9d_moe.router.metric_config:RouterMetricConfig"),
        build=Ref("d9d_moe.router.metric:RouterMetric"),
        requires=frozenset({"model:experts", "model:tallies"}),
    )

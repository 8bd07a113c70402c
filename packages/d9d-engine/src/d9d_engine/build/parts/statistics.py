"""Statistics of a job: its metrics, with names of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from d9d_core.components.contract import check_metric
from d9d_core.components.instantiate import instantiate
from d9d_core.config.resolve import Part
from d9d_core.plugin.capabilities import Chosen
from d9d_core.protocols.metric import Metric
from torch import distributed as dist

from d9d_engine.build.assemble import Assembly
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.metrics import Statistics


def build_statistics(
    parts: Sequence[Part],
    assembly: Assembly,
    topology: Topology,
    group: dist.ProcessGroup | None,
    gated: bool,
    own: Mapping[str, Metric] | None = None,
) -> Statistics:
    """Build the metrics of a section.

    Args:
        parts: their records and configs.
        assembly: has the full model, for those that want to know it.
        topology: this process among others.
        group: the ranks over which they are merged; ``None`` if there are none.
        gated: undo the updates of steps that were not finite.
        own: metrics of the task's own by name.

    Raises:
        BuildError: a metric breaks its contract.
    """
    metrics: dict[str, Metric] = {}
    for chosen, config in parts:
        metrics[unique_name(chosen, parts)] = instantiate(chosen, config)
    every = metrics | {f"task/{name}" if name in metrics else name: metric for name, metric in (own or {}).items()}
    statistics = Statistics(every, gated=gated, group=group, device=topology.device)
    statistics.attach(assembly.full_model)
    for (chosen, _), metric in zip(parts, metrics.values(), strict=True):
        check_metric(chosen, metric)
    return statistics


def unique_name(chosen: Chosen, parts: Sequence[Part]) -> str:
    """Name of a component among those of its section: that of its record, with the place if several have it."""
    names = [other.spec.key for other, _ in parts]
    return chosen.spec.key if names.count(chosen.spec.key) == 1 else f"{chosen.spec.key}[{chosen.where}]"

"""Statistics of a job: its metrics, with names of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from d9d_core.components.contract import check_metric
from d9d_core.components.instantiate import instantiate
from d9d_core.job_file.resolve import Part, observations_read
from d9d_core.metric import Metric
from d9d_core.registry.capabilities import Chosen
from d9d_core.traits import ObservesOnDemand, modules_with
from torch import distributed as dist

from d9d_engine.compose.assemble import Assembly
from d9d_engine.distributed.mesh import Topology
from d9d_engine.step.metrics import Statistics


def build_statistics(
    parts: Sequence[Part],
    assembly: Assembly,
    topology: Topology,
    group: dist.ProcessGroup | None,
    gated: bool,
    when: Literal["training", "evaluation"],
    own: Callable[[], Mapping[str, Metric]] = dict,
) -> Statistics:
    """Build the statistics of a job: a section's metrics; and have the model's modules compute what they read.

    Args:
        parts: their records and configs.
        assembly: has the full model, for those that want to know it.
        topology: this process among others.
        group: the ranks over which they are merged; ``None`` if there are none.
        gated: undo the updates of steps that were not finite.
        when: what they are updated in. In training, merged states have a stream of their own, if the device has
            several; an evaluation waits for the values at once.
        own: makes the metrics of the task's own, by name.

    Raises:
        BuildError: a metric breaks its contract.
    """
    metrics = _instances(parts, own)
    beside = when == "training" and group is not None and topology.device.type not in ("cpu", "mps", "meta")
    twins = _instances(parts, own) if beside else None
    statistics = Statistics(metrics, gated=gated, group=group, device=topology.device, twins=twins)
    _demand(parts, assembly, when)
    statistics.attach(assembly.full_model)
    for (chosen, _), metric in zip(parts, metrics.values(), strict=False):  # the task's own follow
        check_metric(chosen, metric)
    return statistics


def _instances(parts: Sequence[Part], own: Callable[[], Mapping[str, Metric]]) -> dict[str, Metric]:
    """New metrics: those of the section, and then those of the task."""
    made: dict[str, Metric] = {unique_name(chosen, parts): instantiate(chosen, config) for chosen, config in parts}
    return made | {f"task/{name}" if name in made else name: metric for name, metric in own().items()}


def _demand(parts: Sequence[Part], assembly: Assembly, when: Literal["training", "evaluation"]) -> None:
    """Have the modules of this rank's stages compute what a metric reads and nothing else needs."""
    read = frozenset[str]().union(*(observations_read(chosen, config) for chosen, config in parts))
    for stage in assembly.stages.values():
        for module in modules_with(stage, ObservesOnDemand).values():
            for name in sorted(read & set(module.on_demand())):
                module.observe(name, when)


def unique_name(chosen: Chosen, parts: Sequence[Part]) -> str:
    """Name of a component among those of its section: that of its record, with the place if several have it."""
    names = [other.spec.key for other, _ in parts]
    return chosen.spec.key if names.count(chosen.spec.key) == 1 else f"{chosen.spec.key}[{chosen.where}]"

"""Build of a job's statistics from its metrics."""

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
    """Build the statistics of a section's metrics, and let modules compute the observations that the metrics read.

    Args:
        parts: plugin records and configs of the metrics.
        assembly: assembly with the full model, for metrics that attach to it.
        topology: rank, device, meshes and process groups of this process.
        group: process group over which metrics are merged; ``None`` for a single rank.
        gated: whether to undo the metric updates of steps that were not finite.
        when: ``training`` merges states on a separate stream, if the device has several; ``evaluation`` waits for the
            values at once.
        own: makes the metrics of the task, by name.

    Raises:
        BuildError: a metric breaks its contract.
    """
    metrics = _instances(parts, own)
    beside = when == "training" and group is not None and topology.device.type not in ("cpu", "mps", "meta")
    twins = _instances(parts, own) if beside else None
    statistics = Statistics(metrics, gated=gated, group=group, device=topology.device, twins=twins)
    _demand(parts, assembly, when)
    statistics.attach(assembly.full_model)
    for (chosen, _), metric in zip(parts, metrics.values(), strict=False):  # metrics of the task are last
        check_metric(chosen, metric)
    return statistics


def _instances(parts: Sequence[Part], own: Callable[[], Mapping[str, Metric]]) -> dict[str, Metric]:
    """Instantiate the metrics of a job section and the task's own metrics, by name."""
    made: dict[str, Metric] = {unique_name(chosen, parts): instantiate(chosen, config) for chosen, config in parts}
    return made | {f"task/{name}" if name in made else name: metric for name, metric in own().items()}


def _demand(parts: Sequence[Part], assembly: Assembly, when: Literal["training", "evaluation"]) -> None:
    """Make modules of this rank's stages compute the observations that only metrics read."""
    read = frozenset[str]().union(*(observations_read(chosen, config) for chosen, config in parts))
    for stage in assembly.stages.values():
        for module in modules_with(stage, ObservesOnDemand).values():
            for name in sorted(read & set(module.on_demand())):
                module.observe(name, when)


def unique_name(chosen: Chosen, parts: Sequence[Part]) -> str:
    """Key of a component in its section: its record's key, with its field in the job if several have the same key."""
    names = [other.spec.key for other, _ in parts]
    return chosen.spec.key if names.count(chosen.spec.key) == 1 else f"{chosen.spec.key}[{chosen.where}]"

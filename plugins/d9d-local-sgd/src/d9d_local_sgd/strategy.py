"""Strategies ``local_sgd`` and ``diloco``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from d9d_core.strategy import Applied, Collective, GradientOwner, Meetings, StepShape
from d9d_core.topology import Topology
from torch import nn

from d9d_local_sgd.buckets import bucket_bytes, buckets
from d9d_local_sgd.config import DiLoCoConfig, LocalSgdConfig
from d9d_local_sgd.meetings import Averages, OuterSteps, local_parameters

_AXIS = "dp_replicate"


class LocalSgd:
    """Strategy of local SGD: replicas along ``dp_replicate`` are averaged every ``period`` steps."""

    def __init__(self, config: LocalSgdConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Leave the stage unchanged, and return the averaging of the replicas. Collective over all ranks."""
        group, replicas = topology.axes_group(_AXIS), topology.sizes[_AXIS]
        return _applied(stage, topology, Averages(stage, group, replicas, self._config.period), self._config.period)


class DiLoCo:
    """Strategy of DiLoCo: every ``period`` steps, an outer optimizer takes a step along the replicas' mean change."""

    def __init__(self, config: DiLoCoConfig) -> None:
        self._config = config

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        """Leave the stage unchanged, and return the outer steps. Collective over all ranks."""
        config, group = self._config, topology.axes_group(_AXIS)
        outer = OuterSteps(stage, group, topology.sizes[_AXIS], config.period, config.outer_lr, config.outer_momentum)
        return _applied(stage, topology, outer, config.period)


@dataclass(frozen=True)
class MeetingCollectives:
    """Communication (:class:`d9d_core.strategy.Communication`) of averagings or outer steps: an all-reduce per bucket.

    Attributes:
        stage: stage after all strategies.
        ranks: ranks that hold the same part of the model in all replicas.
        period: number of steps between two averagings or outer steps.
    """

    stage: nn.Module
    ranks: tuple[int, ...]
    period: int

    def __call__(self, step: StepShape) -> Iterator[Collective]:  # noqa: ARG002 - the signature of Communication
        """List the all-reduces of one averaging or outer step."""
        parameters = local_parameters(self.stage)
        for names in buckets(parameters):
            if size := bucket_bytes(parameters, names):
                yield Collective("all_reduce", _AXIS, self.ranks, size, 1, "meeting of replicas", every=self.period)


def _applied(stage: nn.Module, topology: Topology, meetings: Meetings, period: int) -> Applied:
    ranks = topology.grid("dense").group(topology.rank, [_AXIS])
    return Applied(
        modules=("",),
        gradients=tuple(GradientOwner(name, _AXIS, "none") for name, _ in stage.named_parameters()),
        collectives=MeetingCollectives(stage, ranks, period),
        notes=(f"replicas take their own optimizer steps and meet every {period} steps",),
        meetings=meetings,
    )

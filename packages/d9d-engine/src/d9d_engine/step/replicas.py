"""Replicas of the model that take their own optimizer steps, and the meetings at which they become equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from d9d_core.strategy import Meetings
from d9d_core.tensors import local
from d9d_weights.sharding.shards import ReplicaSlice
from torch import Tensor, nn
from torch import distributed as dist

from d9d_engine.distributed.mesh import Topology, place_along
from d9d_engine.step.ownership import Ownership


class Replicas:
    """Replicas that take their own optimizer steps; without a strategy for them, one replica that never differs.

    Args:
        parameters: name -> trained parameter of this rank.
        ownership: owners of the gradient reductions, and the axes along which replicas take their own steps.
        topology: rank, device, meshes and process groups of this process.
        meetings: objects that make the replicas equal after some steps.

    Attributes:
        index: index of this rank's replica.
        count: number of replicas that take their own steps.
        differ: whether the parameters of the replicas differ.
        group: process group of the ranks that hold the same part of the model, one in each replica; ``None`` for one
            replica.
        meetings: objects that make the replicas equal after some steps.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        ownership: Ownership,
        topology: Topology,
        meetings: Sequence[Meetings] = (),
    ) -> None:
        self.index, self.count = place_along(topology, ownership.apart)
        self.differ = False
        self._parameters = dict(parameters)
        self.group = topology.axes_group(*ownership.apart) if self.count > 1 else None
        self.meetings = tuple(meetings) if self.count > 1 else ()

    @property
    def kept(self) -> bool:
        """Whether checkpoints keep every replica, because a strategy declares meetings."""
        return bool(self.meetings)

    def start(self) -> None:
        """Create the state of :attr:`meetings` from the parameters, which are equal in all replicas."""
        self.differ = False
        for one in self.meetings:
            one.start()

    def after_update(self, steps: int) -> None:
        """Make the replicas equal if a meeting is due after ``steps`` steps. Collective over the replicas."""
        for one in self.meetings:
            if one.due(steps):
                one.meet()
        self.differ = not all(one.due(steps) for one in self.meetings)

    def state(self) -> dict[str, Tensor]:
        """State of all :attr:`meetings`, equal in all replicas: ``"<parameter>/<name>"`` -> tensor, not a copy."""
        return {name: tensor for one in self.meetings for name, tensor in one.state().items()}

    def slices(self, tensors: Mapping[str, Tensor]) -> dict[str, ReplicaSlice]:
        """Tensors of this rank's replica, as slices of tensors with one row for each replica."""
        return {name: ReplicaSlice(tensor, self.index, self.count) for name, tensor in tensors.items()}

    def parameters(self) -> dict[str, Tensor]:
        """Trained parameters of this rank if the replicas differ, not copies; otherwise empty."""
        return {name: parameter.detach() for name, parameter in self._parameters.items()} if self.differ else {}

    def means(self) -> dict[str, Tensor]:
        """Mean of each trained parameter over the replicas, as new tensors; empty if the replicas are equal.

        Collective over the replicas.
        """
        means = {name: parameter.clone() for name, parameter in self.parameters().items()}
        for mean in means.values():
            self._average(local(mean))
        return means

    @contextmanager
    def equal(self) -> Iterator[None]:
        """Put the mean of the replicas into the parameters inside the block, then restore them bit for bit.

        Collective over the replicas.
        """
        own, means = self.parameters(), self.means()
        before = {name: local(parameter).clone() for name, parameter in own.items()}
        for name, mean in means.items():
            local(own[name]).copy_(local(mean))
        try:
            yield
        finally:
            for name, values in before.items():
                local(own[name]).copy_(values)

    def _average(self, tensor: Tensor) -> None:
        # Sum in float32 or wider, and in one order on all ranks, so that all replicas get the same bits.
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        wide = wide.clone() if wide is tensor else wide
        dist.all_reduce(wide, group=self.group)
        tensor.copy_(wide.div_(self.count))


@dataclass(frozen=True)
class _JoinedMeetings:
    """The :class:`Meetings` of each pipeline stage on this rank, called as one; all are due at the same steps."""

    stages: Sequence[Meetings]

    def start(self) -> None:
        for one in self.stages:
            one.start()

    def due(self, steps: int) -> bool:
        return self.stages[0].due(steps)

    def meet(self) -> None:
        for one in self.stages:
            one.meet()

    def state(self) -> Mapping[str, Tensor]:
        return {name: tensor for one in self.stages for name, tensor in one.state().items()}


def joined_meetings(stages: Sequence[Meetings]) -> Meetings | None:
    """Meetings of all stages of one rank, from a strategy's meetings for each stage; ``None`` if it has none."""
    return _JoinedMeetings(stages) if stages else None

"""Tied parameters, which several stages have, such as an embedding whose weight is also the head's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from d9d_core.program.placement import Pipeline
from d9d_core.tensors import local
from torch import distributed as dist
from torch import nn

from d9d_engine.distributed.mesh import Topology


@dataclass(frozen=True)
class Tie:
    """Copies of one tied parameter.

    Attributes:
        first: first copy on this rank, which the optimizer updates.
        others: further copies on this rank, updated from the first.
        group: process group of the ranks with a copy; ``None`` if only this rank has one.
        trains: whether the parameter is trained.
    """

    first: nn.Parameter
    others: tuple[nn.Parameter, ...]
    group: dist.ProcessGroup | None
    trains: bool = True


@dataclass(frozen=True)
class Ties:
    """Tied parameters of a rank: keeps their copies equal, and sums their gradients.

    Each rank with a copy makes the same update from the same gradient. Copies on one rank share one update, because
    torch cannot shard one parameter in two stages.

    Attributes:
        ties: tied parameters of this rank.
        elsewhere: names of parameters whose first copy is on another rank, which counts them in the norm.
    """

    ties: Sequence[Tie] = ()
    elsewhere: frozenset[str] = field(default_factory=frozenset)

    def gather(self) -> None:
        """Add the gradients of this rank's further copies to the gradient of its first copy."""
        for tie in self.ties:
            for other in tie.others:
                if other.grad is None:
                    continue
                if tie.first.grad is None:
                    tie.first.grad = torch.zeros_like(tie.first, dtype=tie.first.grad_dtype)
                local(tie.first.grad).add_(local(other.grad))

    def reduce(self) -> None:
        """All-reduce the gradients. Collective over the ranks that have a copy."""
        for tie in self.ties:
            if tie.group is not None and tie.trains:
                assert tie.first.grad is not None  # zeros if the step computed none
                dist.all_reduce(local(tie.first.grad), group=tie.group)

    def sizes(self) -> list[tuple[dist.ProcessGroup, int]]:
        """Process group and bytes of each all-reduce of :meth:`reduce`."""
        return [
            (tie.group, local(tie.first).numel() * (tie.first.grad_dtype or tie.first.dtype).itemsize)
            for tie in self.ties
            if tie.group is not None and tie.trains
        ]

    def reset(self) -> None:
        """Set the gradients of this rank's further copies to ``None``."""
        for tie in self.ties:
            for other in tie.others:
                other.grad = None

    @torch.no_grad()
    def copy_values(self) -> None:
        """Copy the values of this rank's first copy to its further copies; call it after the first copy has changed."""
        for tie in self.ties:
            for other in tie.others:
                local(other).copy_(local(tie.first))


def find_ties(
    stages: Mapping[int, nn.Module],
    shared: Mapping[str, tuple[int, ...]],
    trainable: Collection[str],
    pipeline: Pipeline,
    topology: Topology,
    accumulate: torch.dtype | None = None,
) -> Ties:
    """Find the tied parameters of this rank. Collective over all ranks.

    Args:
        stages: index -> stage of this rank.
        shared: parameter -> stages that have it.
        trainable: names of the trained parameters.
        pipeline: assignment of stages to ranks.
        topology: rank, device, meshes and process groups of this process.
        accumulate: dtype in which gradients are accumulated; by default the parameter's dtype.
    """
    ties, elsewhere = [], set()
    position = topology.coordinate["pp"]
    for name, holders in shared.items():
        copies = [stages[stage].get_parameter(name) for stage in holders if stage in stages]
        positions = sorted({pipeline.hosts[stage] for stage in holders})
        group = topology.positions_group("pp", positions) if len(positions) > 1 else None
        if not copies:
            continue
        if positions[0] != position:
            elsewhere.add(name)
        for copy in copies[1:]:
            if accumulate is not None and copy.dtype != accumulate:
                copy.grad_dtype = accumulate
        ties.append(Tie(copies[0], tuple(copies[1:]), group, name in trainable))
    return Ties(ties, frozenset(elsewhere))

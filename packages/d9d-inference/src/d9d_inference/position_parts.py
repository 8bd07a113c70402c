"""Split of samples over the ranks of ``cp`` in an inference run. Shapes: B samples, S positions, R ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.inference import JoinsPositions
from d9d_core.types import Microbatch
from d9d_engine.distributed.mesh import Topology
from d9d_engine.distributed.positions import ZigzagPositions
from torch import Tensor
from torch import distributed as dist


class PositionParts:
    """Splits samples over the ranks of ``cp``, and joins the tensors that a task keeps.

    Creates process groups: the constructor is collective over all ranks.

    Args:
        task: task that names the tensors with a dimension of positions.
        topology: rank, meshes and process groups of this process, with several ranks along ``cp``.
    """

    def __init__(self, task: JoinsPositions, topology: Topology) -> None:
        self._task = task
        self._positions = ZigzagPositions(topology.sizes["cp"], topology.coordinate["cp"])
        self._group = topology.axes_group("cp")

    def split(self, microbatch: Microbatch) -> Microbatch:
        """Select this rank's positions of a microbatch.

        Raises:
            ValueError: the positions cannot be split evenly.
        """
        return self._task.split_positions(microbatch, self._positions)

    def join(self, kept: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Join tensors of ranks to full samples on the first rank; ``None`` on other ranks. Collective over ``cp``."""
        names = sorted(self._task.of_positions & kept.keys())
        joined = {name: self._gathered(kept[name]) for name in names}
        return {**kept, **joined} if self._positions.rank == 0 else None

    def _gathered(self, own: Tensor) -> Tensor:
        """Gather all ranks' parts [B, S / R, ...] as [B, S, ...] on the first rank; other ranks return their own."""
        sent = own.contiguous()
        if self._positions.rank:
            dist.gather(sent, group=self._group, group_dst=0)
            return own
        parts = [torch.empty_like(sent) for _ in range(self._positions.ranks)]
        dist.gather(sent, parts, group=self._group, group_dst=0)
        return ZigzagPositions.joined(torch.stack(parts))

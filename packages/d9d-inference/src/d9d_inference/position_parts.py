"""Parts of samples that ranks of ``cp`` compute in an inference run. Shapes: B samples, S positions, R ranks."""

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
    """Parts of samples on the ranks of ``cp``: taken from microbatches, and joined of what a task keeps.

    Made on all ranks together: it asks for their process groups.

    Args:
        task: says which tensors are of positions.
        topology: this process among others; ``cp`` has several ranks.
    """

    def __init__(self, task: JoinsPositions, topology: Topology) -> None:
        self._task = task
        self._positions = ZigzagPositions(topology.sizes["cp"], topology.coordinate["cp"])
        self._group = topology.axes_group("cp")

    def split(self, microbatch: Microbatch) -> Microbatch:
        """This rank's part of a microbatch.

        Raises:
            ValueError: the ranks cannot share the positions evenly.
        """
        return self._task.split_positions(microbatch, self._positions)

    def join(self, kept: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Tensors of whole samples, on the first rank; ``None`` on the others. Collective over ``cp``."""
        names = sorted(self._task.of_positions & kept.keys())
        joined = {name: self._gathered(kept[name]) for name in names}
        return {**kept, **joined} if self._positions.rank == 0 else None

    def _gathered(self, own: Tensor) -> Tensor:
        """Tensor [B, S, ...] of the parts [B, S / R, ...] of all ranks, on the first one; any on the others."""
        sent = own.contiguous()
        if self._positions.rank:
            dist.gather(sent, group=self._group, group_dst=0)
            return own
        parts = [torch.empty_like(sent) for _ in range(self._positions.ranks)]
        dist.gather(sent, parts, group=self._group, group_dst=0)
        return ZigzagPositions.joined(torch.stack(parts))

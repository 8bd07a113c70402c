"""All-reduce of many tensors at once: one for each operation and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["PackedReduction"]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
Key = tuple[str, torch.dtype]


@dataclass(frozen=True)
class PackedReduction:
    """Copies of many tensors, packed for their all-reduce.

    Attributes:
        buffers: (operation, dtype) -> copies of all tensors of that kind, one after the other, 1-D.
        places: name -> its buffer, where it begins there, and its shape.
    """

    buffers: Mapping[Key, Tensor]
    places: Mapping[str, tuple[Key, int, torch.Size]]

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor], operations: Mapping[str, str], device: torch.device | None
    ) -> PackedReduction:
        """Pack tensors: a copy of each, so that they may change from then on. Does not wait for the device.

        Args:
            tensors: by name; the same names, shapes and dtypes in the same order on all ranks.
            operations: ``sum``, ``max`` or ``min`` of each.
            device: of the buffers; ``None`` if all tensors are on one.
        """
        pieces: dict[Key, list[Tensor]] = {}
        places: dict[str, tuple[Key, int, torch.Size]] = {}
        for name, tensor in tensors.items():
            key = (operations[name], tensor.dtype)
            of_key = pieces.setdefault(key, [])
            places[name] = (key, sum(piece.numel() for piece in of_key), tensor.shape)
            # What was never updated may be in the host's memory still, as on ranks without the last stage.
            of_key.append(tensor.detach().to(device, non_blocking=True).reshape(-1))
        return PackedReduction({key: torch.cat(of_key) for key, of_key in pieces.items()}, places)

    def reduce(self, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Reduce the buffers in place: name -> view of its merged tensor. Collective over the group."""
        for (operation, _), buffer in self.buffers.items():
            dist.all_reduce(buffer, _OPERATIONS[operation], group)
        return {name: self.view(name) for name in self.places}

    def view(self, name: str) -> Tensor:
        """View of a tensor in its buffer."""
        key, start, shape = self.places[name]
        return self.buffers[key][start : start + shape.numel()].view(shape)

"""All-reduce of many tensors packed into one buffer per operation and dtype."""

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
    """Copies of many tensors, packed into 1-D buffers for an all-reduce.

    Attributes:
        buffers: (operation, dtype) -> 1-D buffer with copies of all such tensors.
        places: name -> key of its buffer, offset in the buffer, and shape.
    """

    buffers: Mapping[Key, Tensor]
    places: Mapping[str, tuple[Key, int, torch.Size]]

    @staticmethod
    def of(
        tensors: Mapping[str, Tensor], operations: Mapping[str, str], device: torch.device | None
    ) -> PackedReduction:
        """Pack copies of tensors; the tensors may change afterwards. Does not wait for the device.

        Args:
            tensors: name -> tensor; names, shapes, dtypes and their order must be the same on all ranks.
            operations: name -> ``sum``, ``max`` or ``min``.
            device: device of the buffers; ``None`` if all tensors are on one device.
        """
        pieces: dict[Key, list[Tensor]] = {}
        places: dict[str, tuple[Key, int, torch.Size]] = {}
        for name, tensor in tensors.items():
            key = (operations[name], tensor.dtype)
            of_key = pieces.setdefault(key, [])
            places[name] = (key, sum(piece.numel() for piece in of_key), tensor.shape)
            # A state that was never updated may still be in host memory, as on ranks without the last stage.
            of_key.append(tensor.detach().to(device, non_blocking=True).reshape(-1))
        return PackedReduction({key: torch.cat(of_key) for key, of_key in pieces.items()}, places)

    def reduce(self, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Reduce the buffers in place; return name -> view of the reduced tensor. Collective over the group."""
        for (operation, _), buffer in self.buffers.items():
            dist.all_reduce(buffer, _OPERATIONS[operation], group)
        return {name: self.view(name) for name in self.places}

    def view(self, name: str) -> Tensor:
        """View of the named tensor's copy in its buffer."""
        key, start, shape = self.places[name]
        return self.buffers[key][start : start + shape.numel()].view(shape)

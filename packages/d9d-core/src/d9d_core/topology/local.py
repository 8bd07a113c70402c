"""The part of a tensor that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate


def local(tensor: Tensor) -> Tensor:
    """The rank's own shard of a DTensor, sharing its memory; any other tensor itself."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not torch.is_grad_enabled():  # the way of each step; entering no_grad costs more than all the rest
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank. Collective over the ranks of a DTensor's mesh."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        for dim in reversed(
            range(tensor.device_mesh.ndim)
        ):  # last to first, as dimensions split what is left of others
            placements = [*tensor.placements[:dim], Replicate(), *tensor.placements[dim + 1 :]]
            tensor = tensor.redistribute(placements=placements)
        return tensor.to_local()

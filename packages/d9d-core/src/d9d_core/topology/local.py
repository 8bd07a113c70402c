"""The part of a tensor that this rank holds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """The rank's own shard of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank. Collective over the ranks of a DTensor's mesh."""
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.full_tensor()

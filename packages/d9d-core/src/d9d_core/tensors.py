"""Local shards and full tensors of DTensors, and the dtype of wide sums."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: object) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor. Imports nothing: without its module, which takes a second, there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def local(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor on this rank, sharing its memory; any other tensor itself."""
    if not is_dtensor(tensor):
        return tensor
    if not torch.is_grad_enabled():  # the way of each step; entering no_grad costs more than all the rest
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def full(tensor: Tensor) -> Tensor:
    """Full tensor on every rank. Collective over the ranks of a DTensor's mesh."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad(), _several_gathers_are_meant():
        return tensor.full_tensor()


@contextmanager
def _several_gathers_are_meant() -> Iterator[None]:
    """Keeps torch from warning, on every rank, that what is split over two dimensions is gathered in two steps."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Dtype of sums over very many values: float64, where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64

"""Local shards and full tensors of DTensors, the dtype of wide sums, and pictures as PNG."""

from __future__ import annotations

import logging
import struct
import sys
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["beside", "encode_png", "full", "is_dtensor", "local", "local_numel", "wide_dtype"]


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


def local_numel(tensors: Iterable[Tensor]) -> int:
    """Number of elements of tensors that this rank holds."""
    return sum(local(tensor).numel() for tensor in tensors)


def full(tensor: Tensor) -> Tensor:
    """Full tensor on every rank. Collective over the ranks of a DTensor's mesh."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad(), _several_gathers_are_meant():
        return tensor.full_tensor()


def beside(tensor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Tensors that operations take together with another: whole ones where they are not split over the same ranks.

    Collective over the ranks of DTensors of another mesh than that of ``tensor``.
    """
    if not any(map(is_dtensor, (tensor, *others))):
        return others
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh if is_dtensor(tensor) else None
    if all(is_dtensor(other) and other.device_mesh == mesh for other in others):
        return others
    gathered = [full(other) for other in others]
    if mesh is None:
        return tuple(gathered)
    return tuple(DTensor.from_local(one, mesh, [Replicate()] * mesh.ndim, run_check=False) for one in gathered)


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


def encode_png(picture: Tensor) -> bytes:
    """Encode a picture as PNG (W3C Portable Network Graphics, third edition), without an imaging library.

    Args:
        picture: uint8 [height, width, 3], red, green and blue, on the host.
    """
    height, width, _ = picture.shape
    rows = picture.contiguous().reshape(height, 3 * width).numpy()
    lines = b"".join(b"\0" + row.tobytes() for row in rows)  # filter 0: each row as it is
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, true colour, not interlaced
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

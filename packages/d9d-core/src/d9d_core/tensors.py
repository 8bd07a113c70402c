"""Local shards and full tensors of DTensors, the dtype of long sums, and PNG encoding."""

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
    """Whether a tensor is a DTensor. Does not import DTensor, which is slow; without the import, none can exist."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, getattr(module, "DTensor", ()))


def local(tensor: Tensor) -> Tensor:
    """Local shard of a DTensor on this rank, sharing its memory; other tensors are returned unchanged."""
    if not is_dtensor(tensor):
        return tensor
    if not torch.is_grad_enabled():  # the usual case in a step; entering no_grad costs more than the rest
        return tensor.to_local()
    with torch.no_grad():
        return tensor.to_local()


def local_numel(tensors: Iterable[Tensor]) -> int:
    """Total number of elements of some tensors that are on this rank."""
    return sum(local(tensor).numel() for tensor in tensors)


def full(tensor: Tensor) -> Tensor:
    """Full tensor of a DTensor, on every rank; other tensors unchanged. Collective over the DTensor's mesh."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad(), _without_gather_warning():
        return tensor.full_tensor()


def beside(tensor: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Make ``others`` usable in one operation with ``tensor``.

    If any of ``others`` has a different device mesh than ``tensor``, all ``others`` are gathered to full tensors and
    replicated on the mesh of ``tensor``. Collective over the ranks of the meshes of ``others``.
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
def _without_gather_warning() -> Iterator[None]:
    """Suppress torch's warning, on every rank, about two gathers for a tensor sharded over two mesh dimensions."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Dtype for sums over very many values: float64 if the device supports it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def encode_png(picture: Tensor) -> bytes:
    """Encode a picture as PNG (W3C Portable Network Graphics, third edition), without an imaging library.

    Args:
        picture: uint8 [height, width, 3], red, green and blue, on the host.
    """
    height, width, _ = picture.shape
    rows = picture.contiguous().reshape(height, 3 * width).numpy()
    lines = b"".join(b"\0" + row.tobytes() for row in rows)  # filter type 0: unfiltered rows
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits, true colour, not interlaced
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

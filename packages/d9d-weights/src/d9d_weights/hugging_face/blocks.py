"""Blocks of tensors that pass through a buffer of fixed size."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

#: Bytes of a block: so large that starting a copy costs little, so small that each thread can have a block.
BLOCK = 1 << 24


def blocks(shape: Sequence[int], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut an array into blocks that are consecutive in row-major order.

    Args:
        shape: shape of the array.
        limit: maximum number of elements of a block, at least one.

    Yields:
        Offset and shape of each block; nothing for an empty array.
    """
    total, row = math.prod(shape), math.prod(shape[1:])
    if 0 < total <= limit:
        yield (0,) * len(shape), tuple(shape)
    elif total and row <= limit:
        rest = (0,) * (len(shape) - 1)
        step = limit // row
        for first in range(0, shape[0], step):
            yield (first, *rest), (min(step, shape[0] - first), *shape[1:])
    elif total:
        for first in range(shape[0]):
            for offset, size in blocks(shape[1:], limit):
                yield (first, *offset), (1, *size)


class BlockBuffer:
    """Buffer for blocks of tensors; each thread gets its own memory, allocated on first use.

    Args:
        limit: bytes of the buffer, enough for at least one element.
    """

    def __init__(self, limit: int = BLOCK) -> None:
        self._limit = limit
        self._memory = threading.local()

    def views(self, tensor: Tensor, itemsize: int) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield offset and view of each part of a tensor; a part fits the buffer at ``itemsize`` bytes per element."""
        for offset, shape in blocks(tensor.shape, self._limit // itemsize):
            yield offset, tensor[tuple(slice(first, first + n) for first, n in zip(offset, shape, strict=True))]

    def take(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Contiguous memory for a block, valid until the thread's next call.

        Args:
            like: tensor with the block's shape; for a GPU tensor, the memory is pinned.
            dtype: dtype of the memory.
        """
        pinned = like.device.type == "cuda"
        kind = "pinned" if pinned else "plain"
        memory = getattr(self._memory, kind, None)
        if memory is None:
            memory = torch.empty(self._limit, dtype=torch.uint8, pin_memory=pinned)
            setattr(self._memory, kind, memory)
        return memory[: like.numel() * dtype.itemsize].view(dtype).view(like.shape)

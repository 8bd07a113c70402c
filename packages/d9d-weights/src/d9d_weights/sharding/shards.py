"""What each rank holds of each tensor, and which rank writes which part.

A DTensor is described by the window of the whole that this rank holds; any other tensor is one window, the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from d9d_core.errors import CheckpointError
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor


@dataclass(slots=True)
class Piece:
    """A window of a tensor.

    Attributes:
        offset: its first index in each dimension.
        tensor: its values, sharing memory with the original.
    """

    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Size in each dimension."""
        return tuple(self.tensor.shape)


@dataclass(slots=True)
class Part:
    """What this rank holds of one tensor.

    Attributes:
        dtype: number format.
        shape: of the whole tensor.
        pieces: windows that hold at least one number; of an empty tensor, the whole.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]


def describe(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """The windows that this rank holds.

    Raises:
        CheckpointError: one is a partial sum.
    """
    known: dict[Any, list[ChunkStorageMetadata]] = {}  # of each layout; most tensors have one of a few
    with torch.no_grad():
        return {name: _describe(name, tensor, known) for name, tensor in tensors.items()}


def signature(parts: Mapping[str, Part]) -> list[Any]:
    """Everything about the parts but the numbers, as JSON; orders what it lists."""
    return [
        [name, dtype_name(part.dtype), [*part.shape], [[[*p.offset], [*p.tensor.shape]] for p in part.pieces]]
        for name, part in sorted(parts.items())
    ]


def check_memory(parts: Mapping[str, Part]) -> None:
    """Refuse a tensor under two names: it would be saved twice, and loading one name would undo the other.

    Raises:
        CheckpointError: two tensors share memory.
    """
    spans = sorted(_spans(parts))
    for (device, _, end, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < end:
            raise CheckpointError(f"tensors '{name}' and '{other}' share memory; keep them under one name")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class Owners:
    """Which rank writes which piece: each one once, and all ranks about equally many bytes.

    Every rank comes to the same result by itself.

    Args:
        signatures: of all ranks.

    Raises:
        CheckpointError: ranks disagree about a tensor.
    """

    def __init__(self, signatures: Sequence[Sequence[Any]]) -> None:
        forms: dict[str, tuple[str, list[int]]] = {}
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        sizes: dict[tuple[str, tuple[int, ...]], int] = {}
        for rank, listed in enumerate(signatures):
            for name, dtype, whole, pieces in listed:
                if forms.setdefault(name, (dtype, whole)) != (dtype, whole):
                    raise CheckpointError(
                        f"tensor '{name}' is {dtype} {whole} on rank {rank} and "
                        f"{' '.join(map(str, forms[name]))} on one before it"
                    )
                for offset, shape in pieces:
                    key = (name, tuple(offset))
                    holders.setdefault(key, []).append(rank)
                    sizes[key] = math.prod(shape) * getattr(torch, dtype).itemsize
        load = [0] * len(signatures)
        self._owner: dict[tuple[str, tuple[int, ...]], int] = {}
        # Pieces without a choice first; then large before small, which evens out best.
        for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
            owner = min(holders[key], key=lambda rank: (load[rank], rank))
            self._owner[key] = owner
            load[owner] += sizes[key]

    def own(self, parts: Mapping[str, Part], rank: int) -> dict[str, Part]:
        """The same parts with the pieces that this rank writes, some of them with none."""
        own = {}
        for name, part in parts.items():
            pieces = tuple([piece for piece in part.pieces if self._owner[name, piece.offset] == rank])
            own[name] = part if len(pieces) == len(part.pieces) else Part(part.dtype, part.shape, pieces)
        return own


def _describe(name: str, tensor: Tensor, known: dict[Any, list[ChunkStorageMetadata]]) -> Part:
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return Part(tensor.dtype, shape, (Piece((0,) * len(shape), tensor.detach()),))
    if 0 in shape:
        return Part(tensor.dtype, shape, (Piece((0,) * len(shape), torch.empty(shape, dtype=tensor.dtype)),))
    layout = (tensor.device_mesh, tensor.placements, shape)
    if layout not in known:
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(f"tensor '{name}' is a partial sum ({tensor.placements}); reduce it before saving")
        # Not in the documentation, but it is how any tensor type tells torch's own checkpoints of its shards.
        known[layout] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    chunks = known[layout]
    if len(chunks) == 1:  # what follows does the same, more slowly
        shards = [tensor.to_local()]
    else:
        shards = [find_tensor_shard(tensor, MetadataIndex(name, chunk.offsets)) for chunk in chunks]
    found = zip(chunks, shards, strict=True)
    pieces = [Piece(tuple(chunk.offsets), shard.detach()) for chunk, shard in found if 0 not in chunk.sizes]
    return Part(tensor.dtype, shape, tuple(pieces))


def _spans(parts: Mapping[str, Part]) -> Iterator[tuple[str, int, int, str]]:
    for name, part in parts.items():
        for piece in part.pieces:
            tensor = piece.tensor
            if tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                start = tensor.data_ptr()
                yield str(tensor.device), start, start + (last + 1) * tensor.itemsize, name

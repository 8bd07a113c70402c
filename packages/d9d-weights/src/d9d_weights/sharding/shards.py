"""Local shards of tensors, and the rank that writes each shard.

A DTensor is described by the windows of the global tensor that this rank holds; other tensors are a single window.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from d9d_core.errors import CheckpointError
from d9d_core.tensors import is_dtensor
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.tensor import DTensor


@dataclass(slots=True)
class TensorShard:
    """Local shard of a tensor: a window of the global tensor.

    Attributes:
        offset: first index in each dimension.
        tensor: values, sharing memory with the original.
    """

    offset: tuple[int, ...]
    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the window: the size in each dimension."""
        return tuple(self.tensor.shape)


@dataclass(slots=True)
class LocalShards:
    """Local shards of one tensor on this rank.

    Attributes:
        dtype: dtype of the tensor.
        shape: shape of the global tensor.
        shards: windows with at least one element; for an empty tensor, the tensor itself.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    shards: tuple[TensorShard, ...]


@dataclass(frozen=True, slots=True)
class ReplicaSlice:
    """Tensor of one replica, as a slice of a global tensor whose dimension 0 is the replica.

    Attributes:
        tensor: values of this replica, shape [...]; the global tensor has shape [count, ...].
        index: index of the replica.
        count: number of replicas.
    """

    tensor: Tensor
    index: int
    count: int


def describe(tensors: Mapping[str, Tensor | ReplicaSlice]) -> dict[str, LocalShards]:
    """Describe the shards that this rank holds, by tensor name.

    Raises:
        CheckpointError: a tensor is a partial sum.
    """
    known: dict[Any, list[ChunkStorageMetadata]] = {}  # cache per layout, because a model has few layouts

    def shards(name: str, tensor: Tensor | ReplicaSlice) -> LocalShards:
        if isinstance(tensor, ReplicaSlice):
            return _sliced(shards(name, tensor.tensor), tensor)
        return _describe(name, tensor, known) if is_dtensor(tensor) else _whole(tensor)

    with torch.no_grad():
        return {name: shards(name, tensor) for name, tensor in tensors.items()}


def signature(local_shards: Mapping[str, LocalShards]) -> list[Any]:
    """JSON description of a rank's local shards, for :class:`Owners`: names, dtypes, shapes and windows."""
    return [
        [name, dtype_name(local.dtype), [*local.shape], [[[*p.offset], [*p.tensor.shape]] for p in local.shards]]
        for name, local in sorted(local_shards.items())
    ]


def check_memory(local_shards: Mapping[str, LocalShards]) -> None:
    """Refuse a tensor under two names: it would be saved twice, and loading one name would overwrite the other.

    Raises:
        CheckpointError: two tensors share memory.
    """
    spans = sorted(_spans(local_shards))
    for (device, _, end, name), (other_device, start, _, other) in pairwise(spans):
        if device == other_device and start < end:
            raise CheckpointError(f"tensors '{name}' and '{other}' share memory; keep them under one name")


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype: ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


class Owners:
    """Assignment of shards to the ranks that write them, so that each shard is written once.

    Ranks write about equally many bytes.

    Every rank computes the same result without communication.

    Args:
        signatures: result of :func:`signature` on each rank, in the order of ranks.

    Raises:
        CheckpointError: ranks disagree about a tensor.
    """

    def __init__(self, signatures: Sequence[Sequence[Any]]) -> None:
        forms: dict[str, tuple[str, list[int]]] = {}
        holders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
        sizes: dict[tuple[str, tuple[int, ...]], int] = {}
        for rank, listed in enumerate(signatures):
            for name, dtype, shape, shards in listed:
                if forms.setdefault(name, (dtype, shape)) != (dtype, shape):
                    raise CheckpointError(
                        f"tensor '{name}' is {dtype} {shape} on rank {rank} and "
                        f"{' '.join(map(str, forms[name]))} on an earlier rank; build the same model on all ranks"
                    )
                for offset, size in shards:
                    key = (name, tuple(offset))
                    holders.setdefault(key, []).append(rank)
                    sizes[key] = math.prod(size) * getattr(torch, dtype).itemsize
        load = [0] * len(signatures)
        self._owner: dict[tuple[str, tuple[int, ...]], int] = {}
        # Shards held by one rank come first, then large ones before small ones, which balances best.
        for key in sorted(holders, key=lambda key: (len(holders[key]) > 1, -sizes[key], key)):
            owner = min(holders[key], key=lambda rank: (load[rank], rank))
            self._owner[key] = owner
            load[owner] += sizes[key]

    def own(self, local_shards: Mapping[str, LocalShards], rank: int) -> dict[str, LocalShards]:
        """Restrict local shards to the shards that this rank writes; some tensors then have no shards."""
        own = {}
        for name, local in local_shards.items():
            shards = tuple([shard for shard in local.shards if self._owner[name, shard.offset] == rank])
            own[name] = local if len(shards) == len(local.shards) else LocalShards(local.dtype, local.shape, shards)
        return own


def _whole(tensor: Tensor) -> LocalShards:
    shape = tuple(tensor.shape)
    return LocalShards(tensor.dtype, shape, (TensorShard((0,) * len(shape), tensor.detach()),))


def _sliced(own: LocalShards, part: ReplicaSlice) -> LocalShards:
    shards = [TensorShard((part.index, *shard.offset), shard.tensor.unsqueeze(0)) for shard in own.shards]
    return LocalShards(own.dtype, (part.count, *own.shape), tuple(shards))


def _describe(name: str, tensor: DTensor, known: dict[Any, list[ChunkStorageMetadata]]) -> LocalShards:
    shape = tuple(tensor.shape)
    if 0 in shape:
        return _whole(torch.empty(shape, dtype=tensor.dtype))
    layout = (tensor.device_mesh, tensor.placements, shape)
    if layout not in known:
        if any(placement.is_partial() for placement in tensor.placements):
            raise CheckpointError(f"tensor '{name}' is a partial sum ({tensor.placements}); reduce it before saving")
        # This method is undocumented, but torch's own checkpoints call it for any tensor type.
        known[layout] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    chunks = known[layout]
    if len(chunks) == 1:  # fast path of the general case below
        tensors = [tensor.to_local()]
    else:
        from torch.distributed.checkpoint.metadata import MetadataIndex  # late: imports all of torch's checkpoint code
        from torch.distributed.checkpoint.utils import find_tensor_shard

        tensors = [find_tensor_shard(tensor, MetadataIndex(name, chunk.offsets)) for chunk in chunks]
    found = zip(chunks, tensors, strict=True)
    shards = [TensorShard(tuple(chunk.offsets), held.detach()) for chunk, held in found if 0 not in chunk.sizes]
    return LocalShards(tensor.dtype, shape, tuple(shards))


def _spans(local_shards: Mapping[str, LocalShards]) -> Iterator[tuple[str, int, int, str]]:
    for name, local in local_shards.items():
        for shard in local.shards:
            tensor = shard.tensor
            if tensor.numel():
                last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
                start = tensor.data_ptr()
                yield str(tensor.device), start, start + (last + 1) * tensor.itemsize, name

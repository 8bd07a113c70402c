"""Copies of this rank's shards in the host's memory, taken without waiting for the device.

The copy of an accelerator's tensor runs on a stream of its own while training goes on. Training may read the tensor
meanwhile; before it changes it, the device (not the host) has to wait for the copy: :meth:`Staged.before_mutation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from d9d_weights.sharding.shards import LocalShards, TensorShard
from torch import Tensor

#: Pinned memory is allocated in powers of two, so shards share blocks of this size; a larger shard has its own.
_BLOCK = 1 << 28
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Staged:
    """Staged copies of a checkpoint's shards, in the host's memory and maybe still under way.

    Attributes:
        local_shards: copies in the host's memory.
        copied: passes when they are final; ``None`` if they are already.
        sources: what is being copied, which keeps its memory from being used for something else.
    """

    local_shards: Mapping[str, LocalShards]
    copied: torch.Event | None
    sources: tuple[Tensor, ...]

    def before_mutation(self) -> None:
        """Let the device wait for the copies before it runs what is issued from now on. The host does not wait."""
        if self.copied is not None:
            torch.accelerator.current_stream(self.sources[0].device).wait_event(self.copied)

    def ready(self) -> Mapping[str, LocalShards]:
        """Wait on the host for the copies in their final state."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.local_shards


class Stager:
    """Stager of copies of shards, always into the same memory: the copies before must not be needed any more."""

    def __init__(self) -> None:
        self._copies: dict[str, LocalShards] = {}
        self._block = torch.empty(0, dtype=torch.uint8)  # what is left of the block begun last
        self._stream: torch.Stream | None = None

    def reserve(self, local_shards: Mapping[str, LocalShards]) -> None:
        """Allocate memory for copies of these shards, unless that was done before; takes seconds for many gigabytes."""
        for name, local in local_shards.items():
            present = self._copies.get(name)
            if present is None or _form(present) != _form(local):
                shards = tuple(TensorShard(shard.offset, self._allocate(shard.tensor)) for shard in local.shards)
                self._copies[name] = LocalShards(local.dtype, local.shape, shards)
        for name in self._copies.keys() - local_shards.keys():
            del self._copies[name]

    def stage(self, local_shards: Mapping[str, LocalShards], volatile: Set[str]) -> Staged:
        """Begin to copy shards to the host's memory.

        Args:
            local_shards: of tensors on any devices.
            volatile: names of tensors that may change before anybody calls ``before_mutation``; on the device, they
                are cloned first.
        """
        self.reserve(local_shards)
        with torch.no_grad():
            sources = {name: _sources(local, name in volatile) for name, local in local_shards.items()}
            far = tuple(tensor for tensors in sources.values() for tensor in tensors if tensor.device.type != "cpu")
            for source, buffer in self._pairs(sources):
                if source.device.type == "cpu":
                    buffer.copy_(source)
            copied = self._copy(sources, far[0].device) if far else None
        return Staged(self._copies, copied, far)

    def _copy(self, sources: Mapping[str, tuple[Tensor, ...]], device: torch.device) -> torch.Event:
        if self._stream is None:
            self._stream = torch.Stream(device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        with self._stream:
            for source, buffer in self._pairs(sources):
                if source.device.type != "cpu":
                    buffer.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def _pairs(self, sources: Mapping[str, tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, Tensor]]:
        for name, tensors in sources.items():
            for tensor, copy in zip(tensors, self._copies[name].shards, strict=True):
                yield tensor, copy.tensor

    def _allocate(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        if tensor.nbytes > _BLOCK:
            return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        taken = math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT
        if len(self._block) < taken:
            self._block = torch.empty(_BLOCK, dtype=torch.uint8, pin_memory=True)
        memory, self._block = self._block[: tensor.nbytes], self._block[taken:]
        return memory.view(tensor.dtype).view(tensor.shape)


def _sources(local: LocalShards, volatile: bool) -> tuple[Tensor, ...]:
    tensors = tuple(shard.tensor for shard in local.shards)
    return tuple(t.clone() if volatile and t.device.type != "cpu" else t for t in tensors)


def _form(local: LocalShards) -> list[tuple[tuple[int, ...], torch.Size, torch.dtype]]:
    return [(shard.offset, shard.tensor.shape, shard.tensor.dtype) for shard in local.shards]

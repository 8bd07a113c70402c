"""Copies of this rank's shards in host memory, made without blocking the host.

A tensor on an accelerator is copied on a separate stream while training goes on. Training may read the tensor
meanwhile; before it changes the tensor, the device (not the host) has to wait for the copy:
:meth:`Staged.before_mutation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from d9d_weights.sharding.shards import LocalShards, TensorShard
from torch import Tensor

#: Size in bytes of a block of pinned memory, which several shards share, because pinned memory is allocated in powers
#: of two; a larger shard is allocated by itself.
_BLOCK = 1 << 28
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Staged:
    """Copies of a checkpoint's shards in host memory; the copies may still be running.

    Attributes:
        local_shards: name -> shards in host memory.
        copied: event after the copies; ``None`` if no copy is running.
        sources: tensors being copied; keeping them prevents reuse of their memory.
    """

    local_shards: Mapping[str, LocalShards]
    copied: torch.Event | None
    sources: tuple[Tensor, ...]

    def before_mutation(self) -> None:
        """Make the device wait for the copies before it runs kernels launched from now on. The host does not wait."""
        if self.copied is not None:
            torch.accelerator.current_stream(self.sources[0].device).wait_event(self.copied)

    def ready(self) -> Mapping[str, LocalShards]:
        """Wait on the host until the copies are complete, and return them."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.local_shards


class Stager:
    """Copies shards to host memory, into the same buffers each time; earlier copies become invalid."""

    def __init__(self) -> None:
        self._copies: dict[str, LocalShards] = {}
        self._block = torch.empty(0, dtype=torch.uint8)  # free part of the current pinned block
        self._stream: torch.Stream | None = None

    def reserve(self, local_shards: Mapping[str, LocalShards]) -> None:
        """Allocate buffers for copies of these shards unless they exist, and free all other buffers.

        Takes seconds for many gigabytes.
        """
        for name, local in local_shards.items():
            present = self._copies.get(name)
            if present is None or _form(present) != _form(local):
                shards = tuple(TensorShard(shard.offset, self._allocate(shard.tensor)) for shard in local.shards)
                self._copies[name] = LocalShards(local.dtype, local.shape, shards)
        for name in self._copies.keys() - local_shards.keys():
            del self._copies[name]

    def stage(self, local_shards: Mapping[str, LocalShards], volatile: Set[str]) -> Staged:
        """Start to copy shards to host memory.

        Args:
            local_shards: shards of tensors on any devices.
            volatile: names of tensors that may change before ``before_mutation`` is called; these are cloned on the
                device first.
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

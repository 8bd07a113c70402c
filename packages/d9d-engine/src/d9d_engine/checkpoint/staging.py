"""Copies of this rank's pieces in the host's memory, taken without waiting for the device.

The copy of an accelerator's tensor runs on a stream of its own while training goes on. Training may read the tensor
meanwhile; before it changes it, the device (not the host) has to wait for the copy: :meth:`Staged.before_mutation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import torch
from d9d_weights.sharding.shards import Part, Piece
from torch import Tensor

#: Pinned memory is allocated in powers of two, so pieces share blocks of this size; a larger piece has its own.
_BLOCK = 1 << 28
_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Staged:
    """Copies that are under way.

    Attributes:
        parts: with tensors in the host's memory.
        copied: passes when they are final; ``None`` if they are already.
        sources: what is being copied, which keeps its memory from being used for something else.
    """

    parts: Mapping[str, Part]
    copied: torch.Event | None
    sources: tuple[Tensor, ...]

    def before_mutation(self) -> None:
        """Let the device wait for the copies before it runs what is issued from now on. The host does not wait."""
        if self.copied is not None:
            torch.accelerator.current_stream(self.sources[0].device).wait_event(self.copied)

    def ready(self) -> Mapping[str, Part]:
        """The copies, in their final state. The host waits."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.parts


class Stager:
    """Makes copies, always into the same memory: the copies before must not be needed any more."""

    def __init__(self) -> None:
        self._copies: dict[str, Part] = {}
        self._block = torch.empty(0, dtype=torch.uint8)  # what is left of the block begun last
        self._stream: torch.Stream | None = None

    def reserve(self, parts: Mapping[str, Part]) -> None:
        """Allocate memory for copies of these parts, unless that was done before; takes seconds for many gigabytes."""
        for name, part in parts.items():
            present = self._copies.get(name)
            if present is None or _form(present) != _form(part):
                pieces = tuple(Piece(piece.offset, self._allocate(piece.tensor)) for piece in part.pieces)
                self._copies[name] = Part(part.dtype, part.shape, pieces)
        for name in self._copies.keys() - parts.keys():
            del self._copies[name]

    def stage(self, parts: Mapping[str, Part], volatile: Set[str]) -> Staged:
        """Begin to copy.

        Args:
            parts: pieces of tensors, on any devices.
            volatile: names of tensors that may change before anybody calls ``before_mutation``; on the device, they
                are cloned first.
        """
        self.reserve(parts)
        with torch.no_grad():
            sources = {name: _sources(part, name in volatile) for name, part in parts.items()}
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
            for tensor, copy in zip(tensors, self._copies[name].pieces, strict=True):
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


def _sources(part: Part, volatile: bool) -> tuple[Tensor, ...]:
    tensors = tuple(piece.tensor for piece in part.pieces)
    return tuple(t.clone() if volatile and t.device.type != "cpu" else t for t in tensors)


def _form(part: Part) -> list[tuple[tuple[int, ...], torch.Size, torch.dtype]]:
    return [(piece.offset, piece.tensor.shape, piece.tensor.dtype) for piece in part.pieces]

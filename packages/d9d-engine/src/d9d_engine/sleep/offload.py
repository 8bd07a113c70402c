"""Offload of tensors: contents move to host memory and back, while the tensor objects stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from d9d_core.tensors import local
from torch import Tensor

__all__ = ["Offloaded", "offload"]

#: Bytes of a chunk of host memory. torch's pinned allocator rounds each allocation up to a power of two.
CHUNK = 2**28


@dataclass(frozen=True, slots=True)
class _Stored:
    """Emptied storage of one or more tensors.

    Attributes:
        storage: storage on the device.
        bytes: size of the storage before.
        at: offset of the storage's contents in the sequence of all offloaded bytes.
    """

    storage: torch.UntypedStorage
    bytes: int
    at: int


class Offloaded:
    """Contents of device tensors in host memory. Made by :func:`offload`.

    Attributes:
        bytes: size of the contents in bytes.
    """

    def __init__(self, stored: Sequence[_Stored], chunks: Sequence[Tensor]) -> None:
        self._stored = list(stored)
        self._chunks = list(chunks)
        self.bytes = sum(one.bytes for one in stored)

    def restore(self) -> None:
        """Restore the memory and contents of every tensor, and free the host memory; a second call has no effect.

        Waits for the device.

        Raises:
            torch.OutOfMemoryError: device memory is too small; nothing is lost, and the call can be repeated.
        """
        done: list[_Stored] = []
        try:
            for one in self._stored:
                one.storage.resize_(one.bytes)
                done.append(one)
        except BaseException:
            for one in done:
                one.storage.resize_(0)
            raise
        for one in self._stored:
            for on_device, on_host in _pieces(one, self._chunks):
                on_device.copy_(on_host, non_blocking=True)
        _wait(self._stored)
        self._stored, self._chunks = [], []


def offload(tensors: Iterable[Tensor], pin_memory: bool = True) -> Offloaded:
    """Move the contents of tensors to host memory, and release their device memory.

    A tensor stays the same object with its shape, strides, dtype, DTensor mesh and placements, and so do its views and
    aliases; they must not be read or written until :meth:`Offloaded.restore`. Waits for the device.

    Args:
        tensors: tensors on a device, which may be the CPU; local shards of DTensors are moved. Tensors without own
            releasable memory (meta device, file-backed, shared between processes, empty) are ignored.
        pin_memory: copy to pinned memory, for the full speed of the link; no effect for tensors on the CPU.

    Returns:
        Object that restores the tensors.
    """
    stored: list[_Stored] = []
    at = 0
    for storage in _storages(tensors):
        stored.append(_Stored(storage, storage.nbytes(), at))
        at += storage.nbytes()
    pinned = pin_memory and any(one.storage.device.type != "cpu" for one in stored)
    sizes = [min(CHUNK, at - begin) for begin in range(0, at, CHUNK)]
    chunks = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in sizes]
    for one in stored:
        for on_device, on_host in _pieces(one, chunks):
            on_host.copy_(on_device, non_blocking=True)
    _wait(stored)
    for one in stored:
        one.storage.resize_(0)
    return Offloaded(stored, chunks)


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Releasable storages of tensors, each once even if several tensors share it."""
    seen: set[int] = set()
    for tensor in tensors:
        own = local(tensor.detach())
        if own.device.type == "meta":
            continue
        storage = own.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen and storage.resizable():
            seen.add(storage.data_ptr())
            yield storage


def _pieces(one: _Stored, chunks: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of byte tensors: part of a storage, and the part of a host memory chunk that holds its copy."""
    contents = torch.empty(0, dtype=torch.uint8, device=one.storage.device).set_(one.storage)
    done = 0
    while done < one.bytes:
        chunk, begin = divmod(one.at + done, CHUNK)
        count = min(one.bytes - done, CHUNK - begin)
        yield contents[done : done + count], chunks[chunk][begin : begin + count]
        done += count


def _wait(stored: Iterable[_Stored]) -> None:
    for device in {one.storage.device for one in stored}:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

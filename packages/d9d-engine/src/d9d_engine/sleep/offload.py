"""Offload of tensors: their contents move to the host's memory and back, the tensors themselves stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from d9d_core.tensors import local
from torch import Tensor

__all__ = ["Offloaded", "offload"]

#: Bytes of a piece of the host's memory. The pinned allocator of torch rounds each piece up to a power of two.
CHUNK = 2**28


@dataclass(frozen=True, slots=True)
class _Stored:
    """Storage of one or more tensors, emptied.

    Attributes:
        storage: of the device.
        bytes: its size before.
        at: where its contents begin among all that were offloaded.
    """

    storage: torch.UntypedStorage
    bytes: int
    at: int


class Offloaded:
    """Contents of device tensors in the host's memory. Made by :func:`offload`.

    Attributes:
        bytes: how many; also what the tensors occupied on the device.
    """

    def __init__(self, stored: Sequence[_Stored], chunks: Sequence[Tensor]) -> None:
        self._stored = list(stored)
        self._chunks = list(chunks)
        self.bytes = sum(one.bytes for one in stored)

    def restore(self) -> None:
        """Give every tensor its memory and contents back, and the host's memory free; a second call does nothing.

        Waits for the device.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing is lost, and another call tries again.
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
    """Move the contents of tensors to the host's memory, and release theirs on the device.

    A tensor stays the same object with its shape, strides, dtype, DTensor mesh and placements, and so do all its views
    and aliases; until :meth:`Offloaded.restore`, nobody may read or write it. Waits for the device.

    Args:
        tensors: on a device, which may be the CPU; of DTensors, the part that this rank holds. Those without memory of
            their own that can be released (on the meta device, of a file, shared between processes, empty) are left
            alone.
        pin_memory: copy to pinned memory, which is as fast as the link; of tensors on a CPU it changes nothing.

    Returns:
        What brings them back.
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
    """Storages that can be emptied, each once however many tensors are in it."""
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
    """Parts of a storage, as bytes, beside the parts of the host's memory for them."""
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

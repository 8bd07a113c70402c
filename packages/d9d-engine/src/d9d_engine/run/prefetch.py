"""Prefetching of packs, the microbatches of one step each, to the device before steps need them."""

from __future__ import annotations

import copy
import queue
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Self, cast

import torch
from d9d_core.components.contract import type_of
from d9d_core.data import DataStream
from d9d_core.errors import DataError
from d9d_core.trees import leaves, map_tree
from d9d_core.types import Microbatch, Pack, State

WaitingFor = Callable[[threading.Thread], AbstractContextManager[object]]
Split = Callable[[Microbatch], Microbatch]


class DevicePrefetcher:
    """Takes packs (the microbatches of one step each) from a stream in a thread, and copies them to the device.

    The packs do not depend on ``prefetch``. Use the prefetcher as a context manager: leaving the block ends the thread.
    Deleting the prefetcher also ends the thread, after the pack that it is fetching.

    Args:
        stream: yields packs of CPU tensors; must not be used elsewhere after the first pack was requested.
        device: device of the model.
        prefetch: number of packs to fetch ahead; 0 fetches and copies each pack at its request, without a thread.
        waiting_for: returns a context manager for a wait for the given thread, for reports of a hang; see
            :meth:`d9d_engine.supervision.watchdog.Watchdog.waiting_for`.
        split: selects this rank's part of each microbatch before the copy; ``None`` takes all of it.
    """

    def __init__(
        self,
        stream: DataStream,
        device: torch.device,
        prefetch: int = 2,
        waiting_for: WaitingFor = nullcontext,
        split: Split | None = None,
    ) -> None:
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}; give a number of packs, 0 or more")
        self.stream = stream
        self._transfer = _Transfer(device, beside=prefetch > 0, split=split)
        self._prefetch = prefetch
        self._waiting_for = waiting_for
        self._worker: _Worker | None = None
        self._forgotten: weakref.finalize[[], DevicePrefetcher] | None = None
        self._state: State | None = None
        self._closed = False

    def next(self) -> Pack:
        """Return the next pack, on the device.

        Raises:
            Exception: the stream's exception for this pack, repeatedly until :meth:`load_state`.
            RuntimeError: the prefetcher is closed.
        """
        if self._closed:
            raise RuntimeError("this prefetcher is closed; open another one on a stream")
        if not self._prefetch:
            return self._transfer.start(_next_pack(self.stream)).receive()
        if self._worker is None:
            self._state = copy.deepcopy(self.stream.state())
            self._worker = _Worker(self.stream, self._transfer, self._prefetch)
            self._forgotten = weakref.finalize(self, self._worker.ask_to_stop)
        with self._waiting_for(self._worker.thread):
            taken = self._worker.take()
        self._state = taken.state
        return taken.transferred.receive()

    def state(self) -> State:
        """State of the stream after the last pack that :meth:`next` returned; the stream itself may be ahead."""
        return self.stream.state() if self._state is None else self._state

    def load_state(self, state: State) -> None:
        """Continue at ``state``: prefetched packs are dropped, and no pack is fetched before :meth:`next`.

        Raises:
            DataError: the state belongs to other data.
        """
        self._stop()
        self.stream.load_state(state)
        self._state = None

    def close(self) -> None:
        """End the thread, after the pack it may be fetching. :meth:`state` does not change."""
        self._closed = True
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stop(self) -> None:
        if self._worker is not None:
            if self._forgotten is not None:
                self._forgotten.detach()
            self._worker.stop()
            self._worker = None


def _next_pack(stream: DataStream) -> Pack:
    pack: object = stream.next_pack()
    if not isinstance(pack, Sequence):
        raise DataError(f"{_name_of(stream)}.next_pack() returned {type_of(pack)}; return a list of microbatches")
    for microbatch in pack:
        if not isinstance(microbatch, Mapping):
            kind = type(microbatch).__name__
            raise DataError(
                f"{_name_of(stream)}.next_pack() returned a list of {kind}; a microbatch maps names to tensors"
            )
        for name, tensor in microbatch.items():
            if not isinstance(tensor, torch.Tensor):
                kind = type(tensor).__name__
                raise DataError(f"{_name_of(stream)}.next_pack(): '{name}' of a microbatch is a {kind}, not a tensor")
    return pack


def _name_of(stream: DataStream) -> str:
    return f"{type(stream).__module__}:{type(stream).__qualname__}"


class _Transfer:
    """Copies packs to a device, on a separate stream if possible.

    Args:
        device: target device.
        beside: whether to copy on a separate stream, if the device supports several.
        split: selects the part of a microbatch to copy; ``None`` copies all of it.
    """

    def __init__(self, device: torch.device, beside: bool, split: Split | None = None) -> None:
        self._split = split
        # MPS has a single stream, and shares its memory with the CPU.
        self._has_streams = device.type not in ("cpu", "mps", "meta")
        self._beside = torch.Stream(device) if beside and self._has_streams else None
        # Keep the index of the device: the thread that receives a pack may have another current device.
        self._device = device if self._beside is None else self._beside.device

    def start(self, pack: Pack) -> _Transferred:
        """Start to copy a pack; the caller calls ``receive`` of the result later, maybe in another thread."""
        if self._split is not None:
            pack = [self._split(microbatch) for microbatch in pack]
        if self._device.type == "cpu":
            return _Transferred(pack)
        if self._beside is None:
            return _Transferred(self._copy(pack))
        with self._beside:
            copied = self._copy(pack)
        return _Transferred(copied, self._device, self._beside.record_event())

    def _copy(self, pack: Pack) -> Pack:
        # Only copies from pinned memory are asynchronous.
        pack = list(pack)  # the pack may be any type of sequence
        if not self._has_streams:
            return cast("Pack", map_tree(lambda tensor: tensor.to(self._device), pack))
        return cast("Pack", map_tree(lambda tensor: tensor.pin_memory().to(self._device, non_blocking=True), pack))


@dataclass(frozen=True, slots=True)
class _Transferred:
    """Pack whose copy has been started.

    Attributes:
        pack: pack on the device.
        device: device of the pack; ``None`` if the copy is complete.
        copied: event after the copy.
    """

    pack: Pack
    device: torch.device | None = None
    copied: torch.Event | None = None

    def receive(self) -> Pack:
        """Return the pack for use in the current stream, which waits for the copy; the host does not wait."""
        if self.copied is not None:
            current = torch.accelerator.current_stream(self.device)
            current.wait_event(self.copied)
            for tensor in leaves(self.pack):
                # The allocator must not reuse the memory for the next copy while this stream still reads it.
                tensor.record_stream(current)
        return self.pack


@dataclass(frozen=True, slots=True)
class _Taken:
    """Pack that the thread fetched ahead, with the state of the stream after the pack."""

    transferred: _Transferred
    state: State


class _Worker:
    """Thread that fetches packs from a stream, at most ``ahead`` more than were requested."""

    def __init__(self, stream: DataStream, transfer: _Transfer, ahead: int) -> None:
        self._stream = stream
        self._transfer = transfer
        self._room = threading.Semaphore(ahead)
        self._ready: queue.SimpleQueue[_Taken | BaseException] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name="d9d-prefetch", daemon=True)
        self.thread.start()

    def take(self) -> _Taken:
        """Wait for the next pack; raises the stream's exception."""
        if self._failure is None:
            item = self._ready.get()
            if isinstance(item, _Taken):
                self._room.release()
                return item
            self._failure = item
        raise self._failure

    def ask_to_stop(self) -> None:
        """Make the thread end after the pack it may be fetching; does not wait, so any thread may call it."""
        self._stopping = True
        self._room.release()

    def stop(self) -> None:
        """End the thread, and wait for its end."""
        self.ask_to_stop()
        self.thread.join()

    def _run(self) -> None:
        while True:
            self._room.acquire()
            if self._stopping:
                return
            try:
                transferred = self._transfer.start(_next_pack(self._stream))
                # Copy the state, because the stream may modify the state that it returned.
                self._ready.put(_Taken(transferred, copy.deepcopy(self._stream.state())))
            except BaseException as error:  # raised again by `take`
                self._ready.put(error)
                return

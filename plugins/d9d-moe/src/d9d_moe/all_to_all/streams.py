"""CUDA side stream for exchanges, and asynchronous copies of integers to the host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SideStream:
    """CUDA stream for all-to-all exchanges, so that they wait only for the rows to send, not for other kernels."""

    __slots__ = ("_stream",)

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    @contextmanager
    def active(self, tensor: Tensor, *, follow: bool = False) -> Iterator[None]:
        """Context manager that launches kernels on the side stream. Does nothing unless ``tensor`` is on CUDA.

        Args:
            tensor: a tensor of the exchange.
            follow: whether the side stream first waits for the work queued so far on the current stream.
        """
        if not tensor.is_cuda:
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)  # type: ignore[no-untyped-call]
        if follow:
            self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            yield


class HostNumbers:
    """Integers copied asynchronously to the host, and awaited when they are needed.

    Args:
        numbers: int64 [n] on any device.
    """

    __slots__ = ("_event", "_numbers")

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> list[int]:
        """Wait on the host until the copy is complete, and return the integers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._numbers.tolist()
        return numbers

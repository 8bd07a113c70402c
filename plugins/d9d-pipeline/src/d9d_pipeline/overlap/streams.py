"""CUDA streams of the stages of a rank; without a GPU, all functions do nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class StageStreams:
    """CUDA streams, one per stage, for its forwards and backwards (autograd runs a node on the stream of its forward).

    Work that uses a tensor on another stream must be ordered after the work that computes it. The tensor's memory must
    also be kept: the allocator gives freed memory to the stream that allocated it, even if another stream still reads
    it. Three kinds of tensors cross streams:

    - Parameters, gradients, inputs of a step, losses: allocated before the step or read after it. :meth:`fork` before
      the first action of a step and :meth:`join` after the last are enough.
    - Activations and gradients handed to another stage of this rank: :meth:`mark` after they are computed and
      :meth:`handoff` before they are used. The receiver's graph keeps the tensor, and may free it while the receiver's
      stream still reads it.
    - Tensors sent to or received from another rank: the handler makes its communication stream wait for the stage's
      stream and the reverse, and calls ``record_stream`` with the stream that did not allocate the buffer.

    Args:
        device: device of the stages.
        stages: indices of the stages.
    """

    def __init__(self, device: torch.device, stages: Iterable[int]) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._streams = {stage: torch.cuda.Stream(device) for stage in stages} if cuda else {}  # type: ignore[no-untyped-call]
        self._around: torch.cuda.Stream | None = None

    @contextmanager
    def on(self, stage: int) -> Iterator[None]:
        """Context in which this thread launches kernels on the stage's stream; does not wait for other streams."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[stage]):
            yield

    def fork(self) -> None:
        """Begin a step: all stages' streams wait for the work queued so far on the current stream."""
        if self._streams:
            self._around = torch.cuda.current_stream(self._device)
            for stream in self._streams.values():
                stream.wait_stream(self._around)

    def join(self) -> None:
        """End a step: the stream that was current in :meth:`fork` waits for all stages' streams."""
        if self._around is not None:
            for stream in self._streams.values():
                self._around.wait_stream(stream)

    def mark(self, stage: int) -> torch.cuda.Event | None:
        """Record an event after the work queued so far on the stage's stream. ``None`` without a GPU."""
        stream = self._streams.get(stage)
        if stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def handoff(
        self, tensors: Iterable[Tensor], source: int | None, target: int | None, made: torch.cuda.Event | None = None
    ) -> None:
        """Let another stage read tensors after the work that computes them.

        Args:
            tensors: tensors allocated on the stream of ``source``.
            source: index of the stage that computed them; ``None`` for the stream that was current in :meth:`fork`.
            target: index of the stage that will read them; ``None`` for the stream that was current in :meth:`fork`.
            made: event of :meth:`mark` for ``source`` after the tensors were computed. Without it the target waits for
                all work queued on ``source``'s stream, which in a pair includes later work, and prevents the overlap.
        """
        first, second = self._stream(source), self._stream(target)
        if first is None or second is None or first == second:
            return
        if made is None:
            second.wait_stream(first)
        else:
            second.wait_event(made)
        for tensor in tensors:
            tensor.record_stream(second)

    def _stream(self, stage: int | None) -> torch.cuda.Stream | None:
        return self._around if stage is None else self._streams.get(stage)

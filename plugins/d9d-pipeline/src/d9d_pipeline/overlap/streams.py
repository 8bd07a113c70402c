"""CUDA streams of the stages of a rank; without a GPU, everything here does nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class StageStreams:
    """CUDA streams of stages for overlap, forward and backward: autograd runs a node on the stream of its forward.

    What has to be ordered across streams, and whose memory has to be kept (the allocator gives memory back to the
    stream that it was allocated on, without asking who else still reads it):

    - Parameters, gradients, inputs of a step, losses: :meth:`fork` before the first action of a step and :meth:`join`
      after the last one are enough, if they are allocated before the one or read after the other.
    - What one stage hands to another one of this rank, an activation or its gradient: :meth:`mark` when it was made and
      :meth:`handoff` before it is used. The receiver's graph keeps the tensor, and frees it while the receiver's stream
      may still read it.
    - What is sent to another rank or received from it: who communicates makes its stream wait for the stage's and the
      other way round, and calls ``record_stream`` with the one that did not allocate the buffer.

    Args:
        device: device of the stages.
        stages: their numbers.
    """

    def __init__(self, device: torch.device, stages: Iterable[int]) -> None:
        cuda = device.type == "cuda"
        self._device = device
        self._streams = {stage: torch.cuda.Stream(device) for stage in stages} if cuda else {}  # type: ignore[no-untyped-call]
        self._around: torch.cuda.Stream | None = None

    @contextmanager
    def on(self, stage: int) -> Iterator[None]:
        """Context that launches on the stage's stream, in this thread, and orders nothing."""
        if not self._streams:
            yield
            return
        with torch.cuda.stream(self._streams[stage]):
            yield

    def fork(self) -> None:
        """Begin a step: all stages come after what the current stream was given so far."""
        if self._streams:
            self._around = torch.cuda.current_stream(self._device)
            for stream in self._streams.values():
                stream.wait_stream(self._around)

    def join(self) -> None:
        """End a step: the stream that was current in :meth:`fork` comes after all stages."""
        if self._around is not None:
            for stream in self._streams.values():
                self._around.wait_stream(stream)

    def mark(self, stage: int) -> torch.cuda.Event | None:
        """Record an event after what the stage was given so far. ``None`` without a GPU."""
        stream = self._streams.get(stage)
        if stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def handoff(
        self, tensors: Iterable[Tensor], source: int | None, target: int | None, made: torch.cuda.Event | None = None
    ) -> None:
        """Let another stage read tensors, after the work that made them.

        Args:
            tensors: allocated on the stream of ``source``.
            source: the stage that made them; ``None`` is the stream around the step.
            target: the stage that will read them; ``None`` as above.
            made: the mark of ``source`` from when they were made. Without it the target waits for all that ``source``
                was given so far: in a pair that includes what its other side has just launched, and little overlaps.
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

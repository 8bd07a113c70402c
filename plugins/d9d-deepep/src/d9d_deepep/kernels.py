"""DeepEP's dispatch and combine kernels, which run on DeepEP's stream until the current stream waits for them.

Shapes: T tokens of this rank, H features, k experts of a token, N tokens received.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class PendingTensors:
    """Tensors that a running kernel still writes.

    Args:
        tensors: outputs of the kernel, which must not be used before :meth:`wait`.
        event: DeepEP's event of the kernel.
    """

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: tuple[Tensor, ...], event: Any) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> tuple[Tensor, ...]:
        """Make the current stream, but not the host, wait for the tensors; return them."""
        self._event.current_stream_wait()
        return self._tensors


class Handle:
    """Handle of a DeepEP dispatch: an opaque tuple of the library.

    Its tensors can be taken out, so that autograd can save them, and put back.

    Args:
        parts: the library's tuple.
    """

    __slots__ = ("_others", "tensors")

    def __init__(self, parts: Sequence[Any]) -> None:
        self.tensors = tuple(part for part in parts if isinstance(part, Tensor))
        self._others = [None if isinstance(part, Tensor) else (part,) for part in parts]

    def shape(self) -> Handle:
        """Copy of the handle without its tensors."""
        empty = Handle(())
        empty._others = self._others
        return empty

    def filled(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """Handle as the tuple that DeepEP returned, with ``tensors`` in the places of its tensors."""
        left = iter(tensors)
        return tuple(next(left) if other is None else other[0] for other in self._others)


def dispatch_again(buffer: Any, rows: Tensor, handle: tuple[Any, ...]) -> PendingTensors:
    """Start to send rows [T, H] to the ranks to which an earlier dispatch sent these tokens -> [N, H]. Collective."""
    sent, _, _, _, _, event = buffer.dispatch(rows.contiguous(), handle=handle, **launch(buffer))
    return PendingTensors((sent,), event)


def combine(buffer: Any, rows: Tensor, handle: tuple[Any, ...], weights: Tensor | None = None) -> PendingTensors:
    """Start to send rows [N, H] and weights [N, k] back and sum them by token -> [T, H], [T, k]. Collective."""
    summed, weights, event = buffer.combine(
        rows.contiguous(), handle, topk_weights=None if weights is None else weights.contiguous(), **launch(buffer)
    )
    return PendingTensors((summed,) if weights is None else (summed, weights), event)


def launch(buffer: Any) -> dict[str, Any]:
    """Launch arguments for an asynchronous kernel that runs after all work on the current stream."""
    return after(buffer.capture())


def after(event: Any) -> dict[str, Any]:
    """Launch arguments for an asynchronous kernel that runs after ``event``; its outputs belong to DeepEP's stream."""
    return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}

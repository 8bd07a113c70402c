"""DeepEP's dispatch and combine kernels: launched on its own stream, awaited by the current one.

Shapes: T tokens of this rank, H features, k experts of a token, N tokens that arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


class PendingTensors:
    """Tensors that a kernel is still writing.

    Args:
        tensors: not to be touched before :meth:`wait`.
        event: DeepEP's, of the kernel.
    """

    __slots__ = ("_event", "_tensors")

    def __init__(self, tensors: tuple[Tensor, ...], event: Any) -> None:
        self._tensors = tensors
        self._event = event

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the tensors; the current stream waits, the host does not."""
        self._event.current_stream_wait()
        return self._tensors


class Handle:
    """Handle of a dispatch by DeepEP's kernels, a tuple that only the library understands.

    Its tensors can be taken out, so that autograd saves them, and put in again.

    Args:
        parts: the tuple.
    """

    __slots__ = ("_others", "tensors")

    def __init__(self, parts: Sequence[Any]) -> None:
        self.tensors = tuple(part for part in parts if isinstance(part, Tensor))
        self._others = [None if isinstance(part, Tensor) else (part,) for part in parts]

    def shape(self) -> Handle:
        """Copy without the tensors."""
        empty = Handle(())
        empty._others = self._others
        return empty

    def filled(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        """DeepEP's tuple with these tensors."""
        left = iter(tensors)
        return tuple(next(left) if other is None else other[0] for other in self._others)


def dispatch_again(buffer: Any, rows: Tensor, handle: tuple[Any, ...]) -> PendingTensors:
    """Start to copy rows [T, H] to where the tokens went -> [N, H]. Collective."""
    sent, _, _, _, _, event = buffer.dispatch(rows.contiguous(), handle=handle, **launch(buffer))
    return PendingTensors((sent,), event)


def combine(buffer: Any, rows: Tensor, handle: tuple[Any, ...], weights: Tensor | None = None) -> PendingTensors:
    """Start to sum rows [N, H], and weights [N, k], where their tokens came from -> [T, H], [T, k]. Collective."""
    summed, weights, event = buffer.combine(
        rows.contiguous(), handle, topk_weights=None if weights is None else weights.contiguous(), **launch(buffer)
    )
    return PendingTensors((summed,) if weights is None else (summed, weights), event)


def launch(buffer: Any) -> dict[str, Any]:
    """Arguments of a kernel that comes after what the current stream was given so far, and that it does not await."""
    return after(buffer.capture())


def after(event: Any) -> dict[str, Any]:
    """Arguments of a kernel that comes after an event. DeepEP wants its outputs to belong to its own stream then."""
    return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": True}

"""Dispatcher of experts that lets the other side of an overlapped pair run after it has sent tokens or gradients.

It wraps the :class:`~d9d_core.traits.Dispatcher` of a layer with the trait ``HasExperts``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from d9d_core.traits import Dispatched, Dispatcher, HasExperts, Routing, Transfer, modules_with
from torch import Tensor, nn

from d9d_pipeline.overlap.yield_points import Remove, YieldPoints


def reaches_other_ranks(dispatcher: Dispatcher) -> bool:
    """Whether the dispatcher sends tokens to other ranks: such dispatchers have an attribute ``group``."""
    return getattr(dispatcher, "group", None) is not None


def has_yield_points(stages: Iterable[nn.Module]) -> bool:
    """Whether a layer of the stages sends tokens to other ranks, so that overlapped pairs can hide communication."""
    return any(
        reaches_other_ranks(layer.dispatcher) for stage in stages for layer in modules_with(stage, HasExperts).values()
    )


class YieldingDispatcher:
    """Wraps a dispatcher and yields whenever it has just begun to send.

    A wait on a GPU blocks the stream and not the host, so in a forward the host may yield before or after the wait. In
    a backward the host yields after the wait, when autograd knows the gradients of the transferred tensors. The host
    yields once more before it waits for a dispatch, because this wait may block the host until sizes arrive.

    Args:
        dispatcher: dispatcher to wrap.
        points: yield points of the rank.
    """

    def __init__(self, dispatcher: Dispatcher, points: YieldPoints) -> None:
        self.dispatcher = dispatcher
        self._points = points
        self.outside_graph = getattr(dispatcher, "outside_graph", None)

    def dispatch(self, tokens: Tensor, routing: Routing) -> YieldingTransfer:
        """Start the dispatch of tokens to their experts. Collective if the wrapped dispatcher's is."""
        transfer = self.dispatcher.dispatch(self._points.watched(tokens), routing)
        self._points.forward()
        return YieldingTransfer(transfer, self._points)

    def combine(self, outputs: Tensor, handle: Any) -> Transfer[Tensor]:
        """Start the combine of the experts' outputs. Collective if the wrapped dispatcher's is."""
        transfer = self.dispatcher.combine(self._points.watched(outputs), handle)
        self._points.forward()
        return transfer


class YieldingTransfer:
    """Dispatch in progress that yields after it was awaited.

    Args:
        transfer: dispatch in progress of the wrapped dispatcher.
        points: yield points of the rank.
    """

    def __init__(self, transfer: Transfer[Dispatched], points: YieldPoints) -> None:
        self._transfer = transfer
        self._points = points

    def wait(self) -> Dispatched:
        """Wait for the dispatched tokens, then let the other thread run."""
        arrived = self._transfer.wait()
        self._points.forward()
        return arrived


def replace_dispatcher(layer: HasExperts, points: YieldPoints) -> Remove:
    """Make a layer with experts yield after it has sent tensors. In place.

    Returns:
        Function that restores the layer's dispatcher.
    """
    dispatcher = layer.dispatcher
    layer.dispatcher = YieldingDispatcher(dispatcher, points)

    def remove() -> None:
        layer.dispatcher = dispatcher

    return remove

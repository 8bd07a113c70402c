"""Handing over where tokens leave for their experts, come back, and their gradients do.

A dispatcher is what :class:`d9d_core.traits.HasExperts` holds: ``dispatch(tokens, routing)`` and
``combine(outputs, handle)`` start a transfer, whose ``wait()`` returns what has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from d9d_core.extend import HasExperts, modules_with
from torch import Tensor, nn

from d9d_pipeline.overlap.points import Points, Remove


def sends(dispatcher: Any) -> bool:
    """Whether tokens leave the rank: dispatchers that reach other ranks have these as ``group``."""
    return getattr(dispatcher, "group", None) is not None


def has_points(stages: Iterable[nn.Module]) -> bool:
    """Whether tokens of some layer leave the rank: what a pair can hide."""
    return any(sends(layer.dispatcher) for stage in stages for layer in modules_with(stage, HasExperts).values())


class SendingDispatcher:
    """Hands over whenever the dispatcher has just begun to send something.

    A wait on a GPU holds up the stream and not the host, so it does not matter on which side of it the host hands over.
    In a backward it is the far side: gradients of what was given to a transfer are known to autograd then. Before a
    dispatch is awaited there is one more point, because there the host may have to wait for sizes.

    Args:
        dispatcher: sends.
        points: of the rank.
    """

    def __init__(self, dispatcher: Any, points: Points) -> None:
        self.dispatcher = dispatcher
        self._points = points

    def dispatch(self, tokens: Tensor, routing: Any) -> Sent:
        """Start to bring tokens to their experts. Collective if the dispatcher's is."""
        transfer = self.dispatcher.dispatch(self._points.watched(tokens), routing)
        self._points.forward()
        return Sent(transfer, self._points)

    def combine(self, outputs: Tensor, handle: Any) -> Any:
        """Start to bring outputs back. Collective if the dispatcher's is."""
        transfer = self.dispatcher.combine(self._points.watched(outputs), handle)
        self._points.forward()
        return transfer


class Sent:
    """Tokens on their way.

    Args:
        transfer: the dispatcher's.
        points: of the rank.
    """

    def __init__(self, transfer: Any, points: Points) -> None:
        self._transfer = transfer
        self._points = points

    def wait(self) -> Any:
        """What the dispatcher's returns."""
        arrived = self._transfer.wait()
        self._points.forward()
        return arrived


def replace_dispatcher(layer: HasExperts, points: Points) -> Remove:
    """Have a layer hand over where it sends. In place.

    Returns:
        What takes it back.
    """
    dispatcher = layer.dispatcher
    layer.dispatcher = SendingDispatcher(dispatcher, points)

    def remove() -> None:
        layer.dispatcher = dispatcher

    return remove

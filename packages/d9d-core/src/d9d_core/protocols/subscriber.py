"""Subscribers: observers of the training loop's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Subscriber(Protocol):
    """Observer of the training loop."""

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Pairs of an event type from :mod:`d9d_core.events` and the function it calls."""
        ...

"""Subscribers: observers of the training loop's events."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from d9d_core.types import State


class Subscriber(Protocol):
    """Observer of the training loop."""

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Pairs of an event type from :mod:`d9d_core.events` and the function it calls."""
        ...


@runtime_checkable
class StatefulSubscriber(Protocol):
    """Subscriber with a state that checkpoints keep, so that a resumed run goes on as if nothing had happened."""

    def state(self) -> State:
        """Present state, which JSON can hold; the same on all ranks."""
        ...

    def load_state(self, state: State) -> None:
        """Continue from a saved state, before training starts; what does not fit any more is to be ignored."""
        ...


@runtime_checkable
class EndsTraining(Protocol):
    """Subscriber that may end the run before its last step; it is saved and exported as a finished one."""

    @property
    def reason_to_end(self) -> str | None:
        """Reason to end the run, for people; ``None`` to go on.

        Asked after each step and when a run is resumed. All ranks have to decide alike: from values that are equal on
        all of them, such as logged losses and evaluations, and not from times.
        """
        ...

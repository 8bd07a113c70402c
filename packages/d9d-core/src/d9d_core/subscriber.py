"""Subscribers: observers of the training loop's events.

Start here: :class:`Subscribes` with :func:`subscribe` in front of methods; the events are in :mod:`d9d_core.events`::

    from d9d_core.events import StepEnds, TrainingStarts
    from d9d_core.subscriber import Subscribes, subscribe

    class Shout(Subscribes):
        def __init__(self, config): ...

        @subscribe(TrainingStarts)
        def start(self, event):
            print("here we go")

        @subscribe(StepEnds)
        def step(self, event):
            print("step", event.step)

Optional: :class:`StatefulSubscriber`, :class:`EndsTraining`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeVar, runtime_checkable

from d9d_core.types import State

__all__ = ["EndsTraining", "OwnEvent", "StatefulSubscriber", "Subscriber", "Subscribes", "subscribe"]

Handler = TypeVar("Handler", bound=Callable[..., Any])
#: Attribute of a function in which :func:`subscribe` keeps event types.
_MARK = "d9d_events"


class OwnEvent:
    """Base of events of one's own, which are emitted with the function that :class:`~d9d_core.events.EventsReady` has.

    They are best frozen dataclasses, and are delivered like all others::

        @dataclass(frozen=True)
        class RolloutsReady(OwnEvent):
            reward: float
    """


def subscribe(*events: type[Any]) -> Callable[[Handler], Handler]:
    """Mark a method of a :class:`Subscribes`, or a function that is an observer itself, as a handler of event types.

    ::

        @subscribe(StepEnds)
        def show(event):
            print(event.step)

        job.build(observers=[show, subscribe(TrainingFinished)(lambda event: print("done"))])
    """

    def mark(function: Handler) -> Handler:
        setattr(function, _MARK, (*getattr(function, _MARK, ()), *events))
        return function

    return mark


class Subscribes:
    """Base of subscribers whose handlers are methods with :func:`subscribe` in front."""

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Pairs of an event type and the method that handles it, in the order of the class; a base's come first."""
        names = [name for kind in reversed(type(self).__mro__) for name in vars(kind)]
        for name in dict.fromkeys(names):
            for event in getattr(getattr(type(self), name), _MARK, ()):
                yield event, getattr(self, name)


def subscriptions_of(observer: object) -> Iterator[tuple[type[Any], Callable[[Any], None]]]:
    """Pairs of an event type and its handler: of a subscriber, or of a function that is marked by :func:`subscribe`.

    Raises:
        TypeError: it is neither.
    """
    if callable(observer) and (events := getattr(observer, _MARK, ())):
        yield from ((event, observer) for event in events)
    elif isinstance(observer, Subscriber):
        yield from observer.subscriptions()
    else:
        raise TypeError(
            f"{observer!r} is no observer; give it subscriptions(), or mark a function: @subscribe(StepEnds)"
        )


@runtime_checkable
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

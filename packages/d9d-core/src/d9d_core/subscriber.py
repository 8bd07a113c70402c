"""Subscribers: observers of the training loop's events.

Start here: :class:`Subscribes` and the decorator :func:`subscribe`; the events are in :mod:`d9d_core.events`::

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
#: Attribute of a function in which :func:`subscribe` stores event types.
_MARK = "d9d_events"


class OwnEvent:
    """Base class for a plugin's own events, emitted with :attr:`d9d_core.events.EventsReady.emit`.

    Frozen dataclasses are recommended. A plugin's own events are delivered like d9d's events::

        @dataclass(frozen=True)
        class RolloutsReady(OwnEvent):
            reward: float
    """


def subscribe(*events: type[Any]) -> Callable[[Handler], Handler]:
    """Decorator that makes a method of a :class:`Subscribes`, or a function, the handler of some event types.

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
    """Base class of subscribers whose handlers are methods decorated with :func:`subscribe`."""

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Pairs of an event type and its handler, in the order of the class; methods of base classes come first."""
        names = [name for kind in reversed(type(self).__mro__) for name in vars(kind)]
        for name in dict.fromkeys(names):
            for event in getattr(getattr(type(self), name), _MARK, ()):
                yield event, getattr(self, name)


def subscriptions_of(observer: object) -> Iterator[tuple[type[Any], Callable[[Any], None]]]:
    """Pairs of an event type and its handler, from a subscriber or a function decorated with :func:`subscribe`.

    Raises:
        TypeError: the object is neither a subscriber nor a decorated function.
    """
    if callable(observer) and (events := getattr(observer, _MARK, ())):
        yield from ((event, observer) for event in events)
    elif isinstance(observer, Subscriber):
        yield from observer.subscriptions()
    else:
        raise TypeError(
            f"{observer!r} is not an observer; give it subscriptions(), or decorate a function: @subscribe(StepEnds)"
        )


@runtime_checkable
class Subscriber(Protocol):
    """Observer of the training loop."""

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Pairs of an event type from :mod:`d9d_core.events` and its handler."""
        ...


@runtime_checkable
class StatefulSubscriber(Protocol):
    """Subscriber with a state that checkpoints save, so that a resumed run continues with it."""

    def state(self) -> State:
        """Current state as JSON values, equal on all ranks."""
        ...

    def load_state(self, state: State) -> None:
        """Continue from a saved state, before training starts. Ignore parts of the state that no longer apply."""
        ...


@runtime_checkable
class EndsTraining(Protocol):
    """Subscriber that may end the run before its last step; the run is then saved and exported as finished."""

    @property
    def reason_to_end(self) -> str | None:
        """Reason to end the run, for output; ``None`` to continue.

        Read after each step and when a run is resumed. All ranks must agree, so decide by values that are equal on all
        ranks, such as logged losses and evaluations, not by times.
        """
        ...

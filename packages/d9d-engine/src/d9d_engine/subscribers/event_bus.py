"""Bus of the events in :mod:`d9d_core.events`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from d9d_core.events import CATALOGUE, EventsReady
from d9d_core.subscriber import OwnEvent, subscriptions_of


class Events:
    """Event bus: delivers events to the subscribers' handlers, in the order of the job file.

    Args:
        subscribers: observers, or functions marked by :func:`~d9d_core.subscriber.subscribe`.

    Attributes:
        failure: first exception of a subscriber while :meth:`deferring`; the run must stop and raise it.

    Raises:
        TypeError: a subscriber subscribes to a class that is no event.
    """

    def __init__(self, subscribers: Iterable[object] = ()) -> None:
        self.failure: BaseException | None = None
        self._deferring = False
        self._dismissed: set[int] = set()
        handlers: dict[type[Any], list[tuple[int, Callable[[Any], None]]]] = defaultdict(list)
        for number, subscriber in enumerate(subscribers):
            for event, handler in subscriptions_of(subscriber):
                if event not in CATALOGUE and not (isinstance(event, type) and issubclass(event, OwnEvent)):
                    known = ", ".join(kind.__name__ for kind in CATALOGUE)
                    who = type(subscriber).__name__
                    raise TypeError(f"{who} subscribes to {event!r}; events are: {known}, and subclasses of OwnEvent")
                handlers[event].append((number, handler))
        self._handlers = {event: tuple(found) for event, found in handlers.items()}
        self.emit(EventsReady(self.emit))

    def heard(self, *events: type[Any]) -> bool:
        """Whether any subscriber handles one of these events."""
        return any(self._handlers.get(event) for event in events)

    def emit(self, event: object) -> None:
        """Call the event's handlers.

        A subscriber that raises is not called again. Its exception is raised here. While :meth:`deferring`, only
        KeyboardInterrupt is raised here, and the first other exception at the end.
        """
        for number, handler in self._handlers.get(type(event), ()):
            if number in self._dismissed:
                continue
            try:
                handler(event)
            except BaseException as error:
                self._dismissed.add(number)
                if not self._deferring or isinstance(error, KeyboardInterrupt):
                    raise
                self.failure = self.failure or error

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Keep the first exception of a subscriber inside the block as :attr:`failure`, and raise it at the end."""
        self._deferring = True
        try:
            yield
        except BaseException as error:
            if self.failure is not None and error is not self.failure:
                error.add_note(f"besides, a subscriber had raised {self.failure!r}")
            raise
        finally:
            self._deferring = False
        if self.failure is not None:
            raise self.failure

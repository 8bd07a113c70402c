"""Two threads of which exactly one runs, and which take turns where they say so.

So what both launch has one order, the same on every rank: it follows from the program and not from the clock.
"""

from __future__ import annotations

import threading
from enum import Enum


class Side(Enum):
    """Who holds the baton. The forward begins."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def other(self) -> Side:
        """The one that waits."""
        return Side.BACKWARD if self is Side.FORWARD else Side.FORWARD


class AbortedError(BaseException):
    """The other side failed. Not an ``Exception``: nothing on the way out may take it for one of its own."""


class Baton:
    """Made for one pair, by the thread that runs the forward.

    The backward is all that runs in other threads: the one that called it, and those in which autograd runs nodes and
    repeats forwards.
    """

    def __init__(self) -> None:
        self._forward_thread = threading.get_ident()
        self._changed = threading.Condition()
        self._holder = Side.FORWARD
        self._running = set(Side)
        self._failed = False

    def begin(self, side: Side) -> None:
        """Wait for the first turn.

        Raises:
            AbortedError: the other side has failed.
        """
        with self._changed:
            self._wait(side)

    def hand_over(self, side: Side) -> None:
        """Let the other side run to its next point. Returns at once if it has ended, or if this is not ``side``.

        Raises:
            AbortedError: the other side has failed.
        """
        if (threading.get_ident() == self._forward_thread) is not (side is Side.FORWARD):
            return  # a forward that is repeated inside the backward, or a backward inside the forward
        with self._changed:
            if side.other in self._running:
                self._holder = side.other
                self._changed.notify_all()
            self._wait(side)

    def end(self, side: Side, *, failed: bool) -> None:
        """This side does not run any more; the other one goes on alone, or stops where it waits if this one failed."""
        with self._changed:
            self._running.discard(side)
            self._failed |= failed
            self._holder = side.other
            self._changed.notify_all()

    def _wait(self, side: Side) -> None:
        self._changed.wait_for(lambda: self._holder is side)
        if self._failed:
            raise AbortedError

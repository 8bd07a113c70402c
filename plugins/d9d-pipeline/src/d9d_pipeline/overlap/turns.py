"""Strict alternation of two threads: exactly one runs, and it yields to the other at fixed points.

So what both launch has one order, the same on every rank: it follows from the program and not from the clock.
"""

from __future__ import annotations

import threading
from enum import Enum


class Side(Enum):
    """The two sides of a pair. The forward begins."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def other(self) -> Side:
        """The side that waits while this one runs."""
        return Side.BACKWARD if self is Side.FORWARD else Side.FORWARD


class AbortedError(BaseException):
    """Failure of the other side. Not an ``Exception``: no handler on the way out may take it for one of its own."""


class Turns:
    """Turns of the two sides of one overlapped pair; made by the thread that runs the forward.

    The backward is all that runs in other threads: the one that called it, and those in which autograd runs nodes and
    repeats forwards.
    """

    def __init__(self) -> None:
        self._forward_thread = threading.get_ident()
        self._changed = threading.Condition()
        self._current = Side.FORWARD
        self._running = set(Side)
        self._failed = False

    def begin(self, side: Side) -> None:
        """Wait for the first turn.

        Raises:
            AbortedError: the other side has failed.
        """
        with self._changed:
            self._wait(side)

    def yield_turn(self, side: Side) -> None:
        """Let the other side run to its next point. Returns at once if it has ended, or if this is not ``side``.

        Raises:
            AbortedError: the other side has failed.
        """
        if (threading.get_ident() == self._forward_thread) is not (side is Side.FORWARD):
            return  # a forward that is repeated inside the backward, or a backward inside the forward
        with self._changed:
            if side.other in self._running:
                self._current = side.other
                self._changed.notify_all()
            self._wait(side)

    def end(self, side: Side, *, failed: bool) -> None:
        """End this side; the other one goes on alone, or stops where it waits if this one failed."""
        with self._changed:
            self._running.discard(side)
            self._failed |= failed
            self._current = side.other
            self._changed.notify_all()

    def _wait(self, side: Side) -> None:
        self._changed.wait_for(lambda: self._current is side)
        if self._failed:
            raise AbortedError

"""Strict alternation of two threads: exactly one runs, until it yields to the other at the next yield point.

The order of their kernel launches therefore depends on the program and not on timing, and is the same on every rank.
"""

from __future__ import annotations

import threading
from enum import Enum


class Side(Enum):
    """Sides of an overlapped pair: the forward, which begins, and the backward."""

    FORWARD = "forward"
    BACKWARD = "backward"

    @property
    def other(self) -> Side:
        """Side that waits while this one runs."""
        return Side.BACKWARD if self is Side.FORWARD else Side.FORWARD


class AbortedError(BaseException):
    """Raised in one side of a pair after the other side failed. Not an ``Exception``, so that no handler catches it."""


class Turns:
    """Alternation of the two sides of one overlapped pair; made by the thread that runs the forward.

    All other threads belong to the backward: the thread that called it, and autograd's threads, which run nodes and
    recompute forwards.
    """

    def __init__(self) -> None:
        self._forward_thread = threading.get_ident()
        self._changed = threading.Condition()
        self._current = Side.FORWARD
        self._running = set(Side)
        self._failed = False

    def begin(self, side: Side) -> None:
        """Wait for the first turn of this thread's side.

        Raises:
            AbortedError: the other side has failed.
        """
        with self._changed:
            self._wait(side)

    def yield_turn(self, side: Side) -> None:
        """Let the other side run to its next yield point.

        Returns at once if the other side has ended, or if a thread of the other side calls it: a forward that is
        recomputed in the backward, or a backward inside the forward.

        Raises:
            AbortedError: the other side has failed.
        """
        if (threading.get_ident() == self._forward_thread) is not (side is Side.FORWARD):
            return  # a forward recomputed inside the backward, or a backward inside the forward
        with self._changed:
            if side.other in self._running:
                self._current = side.other
                self._changed.notify_all()
            self._wait(side)

    def end(self, side: Side, *, failed: bool) -> None:
        """End this side. The other side continues alone; if this side failed, the other side stops where it waits."""
        with self._changed:
            self._running.discard(side)
            self._failed |= failed
            self._current = side.other
            self._changed.notify_all()

    def _wait(self, side: Side) -> None:
        self._changed.wait_for(lambda: self._current is side)
        if self._failed:
            raise AbortedError

"""Watchdog: a thread on each rank that detects a stuck run and reports which rank is the cause.

If one rank never enters a collective, all other ranks wait forever, and their stacks do not show why. So when a
deadline passes, every rank's thread publishes its process's activity, and one of them prints the comparison:

    error: no progress for 600 s in phase 'step' (timeouts.step); the odd one out first
      rank 1 (dp_shard=1) on node-a: step 17: not in a collective, but at my_data/stream.py:31 (read)
      ranks 0, 2-7: step 17: waits in all_reduce, called at d9d_engine/step/step.py:66 (__call__)

Then all processes end, because no exception reaches the blocked main threads. The threads communicate through the
store, which needs no communicator. A run counts as stuck once the deadlines of all ranks have passed: while a rank has
time left, the other ranks wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from d9d_engine.supervision.hang_report import Alarm, Status
from d9d_engine.supervision.stacks import doing


@dataclass(frozen=True, slots=True)
class Phase:
    """Phase that the main thread announced last.

    Attributes:
        name: name of the phase, and of its limit.
        step: optimizer step, if there is one.
        since: time of the phase's beginning, or of its last :meth:`Watchdog.beat`, by ``time.monotonic``.
        deadline: deadline of the phase, by ``time.monotonic``.
    """

    name: str
    step: int | None
    since: float
    deadline: float


class Watchdog:
    """Enforces the time limits of a process's phases. No effect without limits or before :meth:`start`.

    The thread that constructs the watchdog must be the training thread: hang reports show its stack.

    Args:
        limits: phase -> seconds.
        who: rank, coordinates and machine of this process.
        changed: called in the main thread when a phase with another name begins, or a limit changes.

    Attributes:
        fails_first: called when this process ends with an exception, if no rank failed before.
    """

    def __init__(
        self, limits: Mapping[str, float] | None = None, who: str = "", changed: Callable[[], None] = lambda: None
    ) -> None:
        self._limits = dict(limits or {})
        self.who = who
        self.fails_first: Callable[[], object] = lambda: None
        self._changed = changed
        self._phase: Phase | None = None
        self._waited_for: threading.Thread | None = None
        self._trains = threading.current_thread()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._alarm: Alarm | None = None

    def phase(self, name: str, step: int | None = None) -> None:
        """Begin a phase, replacing the previous one. Costs no communication.

        Args:
            name: name of the phase, and of its limit.
            step: optimizer step, if there is one.

        Raises:
            KeyError: the phase has no limit.
        """
        if not self._limits:
            return
        now = time.monotonic()
        previous, self._phase = self._phase, Phase(name, step, now, now + self._limits[name])
        if previous is None or previous.name != name:
            self._changed()

    @property
    def longest(self) -> float:
        """Longest limit in seconds; 0 without limits."""
        return max(self._limits.values(), default=0.0)

    def set_limit(self, name: str, seconds: float) -> None:
        """Change the limit of a phase, effective at once if the phase is current. No effect without limits.

        Raises:
            KeyError: the phase has no limit.
        """
        if not self._limits:
            return
        if name not in self._limits:
            raise KeyError(name)
        self._limits[name] = seconds
        self._changed()
        if self._phase is not None and self._phase.name == name:
            self.beat()

    def beat(self) -> None:
        """Restart the current phase's limit, because the main thread has made progress."""
        phase = self._phase
        if phase is not None:
            self.phase(phase.name, phase.step)

    def rest(self) -> None:
        """End the phase: the main thread runs the caller's code, without a limit."""
        self._phase = None

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        """Begin a phase with a time limit for the block, and end the phase after the block."""
        self.phase(name)
        try:
            yield
        finally:
            self.rest()

    @contextmanager
    def waiting_for(self, thread: threading.Thread) -> Iterator[None]:
        """Announce that the main thread waits for ``thread`` inside the block, so that a report shows that thread."""
        self._waited_for = thread
        try:
            yield
        finally:
            self._waited_for = None

    def start(self, alarm: Alarm, pause: float) -> None:
        """Start the thread that watches the deadlines.

        Args:
            alarm: alarm shared with the other ranks.
            pause: seconds between checks.
        """
        self._alarm = alarm
        self._thread = threading.Thread(target=self._watch, args=(alarm, pause), name="d9d-watchdog", daemon=True)
        self._thread.start()

    def failed_elsewhere(self) -> bool:
        """Whether a rank has failed, or the store is gone; false before :meth:`start`. May be called in any thread."""
        try:
            return self._alarm is not None and self._alarm.any_failed()
        except RuntimeError:  # the process that served the store has ended
            return True

    @property
    def first_failure(self) -> tuple[str, int] | None:
        """Name and exit status of the rank that failed first; ``None`` if none has failed, as far as is known."""
        return None if self._alarm is None else self._alarm.first

    def interrupted(self) -> None:
        """Tell the other ranks that this process ends by Ctrl-C. May be called in any thread."""
        if self._alarm is not None:
            self._alarm.interrupt(self.who)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(5.0)  # the thread may wait for a store that no longer answers

    def _watch(self, alarm: Alarm, pause: float) -> None:
        patience = 0.0  # time on the monotonic clock until which another rank has time left
        while not self._stopped.wait(pause):
            phase = self._phase
            late = phase is not None and time.monotonic() > max(phase.deadline, patience)
            left = alarm.look(late, self._status, moved=partial(self._has_moved, phase))
            if left is None:
                # Most collectives raise after a rank's failure, and this rank then ends with the exception.
                if not self._stopped.wait(alarm.grace):
                    alarm.follow()
                return
            patience = time.monotonic() + left if left else patience

    def _has_moved(self, since: Phase | None) -> bool:
        return self._phase is not since or self._stopped.is_set()

    def _status(self) -> Status:
        phase, now = self._phase, time.monotonic()
        found = doing(Path(torch.__file__).parent, self._waited_for, self._trains)
        return Status(
            who=self.who,
            phase=phase.name if phase else "none",
            step=phase.step if phase else None,
            where=found.where,
            waits=found.waits,
            stack=found.stack,
            elapsed=now - phase.since if phase else 0.0,
            remaining=phase.deadline - now if phase else 0.0,
        )

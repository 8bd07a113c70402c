"""Hang report: exchange between the watchdogs of all ranks when one of them detects no progress."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import NoReturn

from d9d_engine.supervision.failure import INTERRUPTED, Failure
from d9d_engine.supervision.identity import Store, spell_ranks, wait_until

#: Exit status after Ctrl-C.
_BY_CTRL_C = 130
#: Store key with the name of the rank that failed first.
FAILED = "failed"


def claim_failure(store: Store, name: str, status: int) -> tuple[str, int]:
    """Claim to be the first rank that failed; return the name and exit status of the rank that really was the first.

    Args:
        store: store shared by all ranks.
        name: name of this rank.
        status: exit status of this rank.

    Raises:
        RuntimeError: the process that served the store has ended.
    """
    store.set(f"status/{name}", str(status))  # before the claim, after which other ranks read it
    first = store.compare_set(FAILED, "", name).decode()
    return first, int(store.get(f"status/{first}"))


@dataclass(frozen=True, slots=True)
class Status:
    """Status of a rank in a hang report. Ranks with equal phase, step, ``where`` and ``waits`` do the same work.

    Attributes:
        who: rank, coordinates and machine.
        phase: name of the phase of the run, such as ``step``.
        step: number of the optimizer step, if there is one.
        where: one-line description of the code that the training thread runs.
        waits: whether that thread waits for a collective or the device.
        stack: stack of that thread, outermost frame first.
        elapsed: seconds since the phase began, or since the last progress in it.
        remaining: seconds to the deadline of the phase; negative after the deadline.
    """

    who: str
    phase: str
    step: int | None
    where: str
    waits: bool
    stack: str
    elapsed: float
    remaining: float


class Alarm:
    """Alarm of a suspected hang: a late rank raises it, all ranks answer, and that rank withdraws it or ends the run.

    Alarms are numbered; after a withdrawn alarm, the next number is used.

    Args:
        store: store with a separate connection, because the main thread may block its own connection.
        rank: rank of this process.
        world_size: number of processes.
        tell: reports a failure to the user; see ``failure.FailureReporter.tell``.
        grace: seconds within which ranks must answer, or end after another rank's failure.

    Attributes:
        first: name of the rank that failed first and its exit status, once :meth:`any_failed` has found them.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, tell: Callable[[Failure], object], grace: float
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._tell = tell
        self.grace = grace
        self._number = 0
        self.first: tuple[str, int] | None = None

    def look(self, late: bool, status: Callable[[], Status], moved: Callable[[], bool]) -> float | None:
        """Answer a pending alarm, or raise one if this rank is late. Does not return if the run is stuck.

        Args:
            late: whether this rank's deadline has passed.
            status: returns the current status of this rank.
            moved: returns whether this rank has made progress since its deadline was set.

        Returns:
            Seconds that another rank has left, during which this rank should wait; 0.0 if no alarm is pending; ``None``
            if a rank has failed or the store is gone.
        """
        try:
            return None if self.any_failed() else self._look(late, status, moved)
        except RuntimeError:
            return None  # the process that served the store has ended

    def any_failed(self) -> bool:
        """Whether a rank has failed.

        Raises:
            RuntimeError: the store is gone.
        """
        if self.first is None and self._store.check([FAILED]):
            name = self._store.get(FAILED).decode()
            key = f"status/{name}"
            self.first = name, int(self._store.get(key)) if self._store.check([key]) else 1
        return self.first is not None

    def interrupt(self, who: str) -> None:
        """Tell the other ranks that this one ends by Ctrl-C, unless a rank has failed before."""
        with suppress(RuntimeError):
            claim_failure(self._store, f"{who} {INTERRUPTED}", _BY_CTRL_C)

    def follow(self) -> NoReturn:
        """End this process because of another rank's failure, with the exit status of that failure."""
        self._tell(Failure("error: another rank failed", second_hand=True))
        self.leave(1 if self.first is None else self.first[1])

    def leave(self, status: int = 1) -> NoReturn:
        """End this process at once: an exception would not reach a main thread that waits in C++."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _look(self, late: bool, status: Callable[[], Status], moved: Callable[[], bool]) -> float:
        key = f"alarm/{self._number}"
        if not self._store.check([key]):
            if not late:
                return 0.0
            self._store.compare_set(key, "", str(self._rank))
        leads = self._store.get(key) == str(self._rank).encode()
        own = status()
        self._store.set(f"{key}/status/{self._rank}", json.dumps(asdict(own)))
        patience = self._judge(key, own, moved) if leads else self._await_verdict(key, own, moved)
        if patience is None:
            return 0.0
        self._number += 1
        return patience

    def _judge(self, key: str, own: Status, moved: Callable[[], bool]) -> float:
        keys = [f"{key}/status/{rank}" for rank in range(self._world_size)]
        wait_until(lambda: self._store.check(keys) or moved(), self.grace, 0.1)
        answers = {
            rank: Status(**json.loads(self._store.get(name)))
            for rank, name in enumerate(keys)
            if self._store.check([name])
        }
        patience = max(0.0, *(status.remaining for status in answers.values()))
        if not patience and not moved():
            self._end(key, Failure(report(answers, self._world_size, own)))
        self._store.set(f"{key}/verdict", str(patience))
        return patience

    def _await_verdict(self, key: str, own: Status, moved: Callable[[], bool]) -> float | None:
        verdict = f"{key}/verdict"
        if not wait_until(lambda: self._store.check([verdict]) or moved(), 3 * self.grace + 10, 0.1):
            # The rank that raised the alarm has ended.
            self._end(key, Failure(report({self._rank: own}, self._world_size, own)))
        if not self._store.check([verdict]):
            return None  # this rank has moved on and answers later
        text = self._store.get(verdict).decode()
        if text == "end":
            self.leave()
        return float(text)

    def _end(self, key: str, failure: Failure) -> NoReturn:
        self._tell(failure)
        with suppress(RuntimeError):
            self._store.set(f"{key}/verdict", "end")
        if self._rank == 0:
            time.sleep(1.0)  # this process may serve the store, from which the other ranks must read the verdict
        self.leave()


def report(answers: Mapping[int, Status], world_size: int, own: Status) -> str:
    """Text of a hang report: activities of all ranks, the outlier first, and the outlier's stack.

    Args:
        answers: rank -> status, for ranks that answered.
        world_size: number of ranks.
        own: status of the rank that raised the alarm.
    """
    groups: dict[tuple[str, int | None, str, bool], list[int]] = {}
    for rank, status in sorted(answers.items()):
        groups.setdefault((status.phase, status.step, status.where, status.waits), []).append(rank)
    # The smallest group is the outlier; of groups of equal size, one that does not wait.
    ordered = sorted(groups.items(), key=lambda group: (len(group[1]), group[0][3]))
    silent = [rank for rank in range(world_size) if rank not in answers]
    limit = f"phase '{own.phase}' (timeouts.{own.phase})"
    lines = [f"error: no progress for {own.elapsed:.0f} s in {limit}; the odd one out first"]
    if silent:
        lines.append(f"  {spell_ranks(silent)}: no answer; the process is gone, or blocked inside native code")
    for (phase, step, where, _), ranks in ordered:
        name = answers[ranks[0]].who if len(ranks) == 1 else spell_ranks(ranks)
        lines.append(f"  {name}: {phase}{'' if step is None else f' {step}'}: {where}")
    odd = answers[ordered[0][1][0]]
    lines += [f"stack of {odd.who}:", odd.stack.rstrip()]
    return "\n".join(lines)

"""Hub of all trackers of a run: a thread for each, so that one that fails or waits neither ends nor delays training."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal

from d9d_core.metric import Table
from d9d_core.registry.entries import shown
from d9d_core.tracker import (
    Histogram,
    RunInfo,
    TakesFiles,
    TakesHistograms,
    TakesPictures,
    TakesTables,
    TakesTexts,
    Tracker,
    TrackerRun,
    storable,
)
from d9d_core.types import State
from torch import Tensor

from d9d_engine.trackers.backlog import Backlog

__all__ = ["TrackerHub"]

#: Entries that may wait for one tracker; later ones are left out until it has caught up.
ROOM = 1000
#: Name beside those of trackers, under which a checkpoint keeps what some had not taken yet.
BEHIND = "(behind)"
#: Share of the patience: a tracker that takes longer is late. What it has not written is in the checkpoint, too, so
#: that waiting again and again would buy little for the time of all ranks.
_SOON = 0.02
_NOT_YET = "has not written everything yet"
#: Names that are reported one by one; a corpus may have a million odd labels.
_REPORTED = 10
#: Values that are refused, with none taken in between, before the backend is to blame; and as many names that a tracker
#: gets for the first time, if it has taken others.
_TRIED, _DOUBTED = 3, 10

#: Kind of values, by the method that writes it -> the protocol of runs that take it.
_TAKES: Mapping[str, type] = {
    "write": object,
    "write_tables": TakesTables,
    "write_histograms": TakesHistograms,
    "write_texts": TakesTexts,
    "write_pictures": TakesPictures,
    "write_files": TakesFiles,
}
#: Kind of values -> one of them, for notes.
_ONE: Mapping[str, str] = {
    "write": "number",
    "write_tables": "table",
    "write_histograms": "histogram",
    "write_texts": "text",
    "write_pictures": "picture",
    "write_files": "file",
}


class TrackerHub:
    """Hub that forwards to every tracker, in a thread of its own.

    Args:
        trackers: by a name that is unique within the job.
        warn: prints a line; called in any thread.
        patience: seconds that :meth:`flush`, :meth:`state` and the answer to :meth:`request_state` wait for all
            trackers together; three times as long while one opens, as :meth:`close` does. One that is late is not
            waited for, until it answers within a fiftieth of that time again, and has taken no longer for anything in
            between.
    """

    def __init__(self, trackers: Mapping[str, Tracker], warn: Callable[[str], None], patience: float = 10.0) -> None:
        self._trackers = dict(trackers)
        self._warn = warn
        self._patience = patience
        self._threads: list[_TrackerThread] = []
        self._states: dict[str, State] = {}
        self._renamed: set[str] = set()

    @property
    def is_empty(self) -> bool:
        """Whether there is no tracker, as on all ranks but the first."""
        return not self._trackers

    def open(self, run: RunInfo, states: Mapping[str, Any]) -> None:
        """Open every tracker, continuing those whose state a checkpoint kept. Does not wait.

        One that was behind at that checkpoint continues from the last step that it had for sure, and gets again what
        followed.
        """
        self._states = {name: state for name, state in states.items() if name != BEHIND}
        behind = states.get(BEHIND, {})
        self._threads = []
        for name, tracker in self._trackers.items():
            step = behind[name]["step"] if name in behind else run.resumed_step
            info = replace(run, resumed_step=step)
            self._threads.append(_TrackerThread(name, tracker, info, self._states.get(name), self._warn))
            for kind, at, values in Backlog.read(behind[name]["entries"]) if name in behind else ():
                self._queue(kind, at, values, self._threads[-1:])  # under the names that it has got before

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values after ``step`` steps. Does not wait."""
        self._hand("write", step, dict(values))

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Log tables after ``step`` steps, where a tracker takes any. Does not wait."""
        self._hand("write_tables", step, tables)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms, where a tracker takes any. Does not wait."""
        self._hand("write_histograms", step, histograms)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Log texts, where a tracker takes any; half of a surrogate pair becomes its escape. Does not wait."""
        # Neither a checkpoint, which keeps what a tracker has not written yet, nor a file in UTF-8 can hold one.
        plain = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
        self._hand("write_texts", step, plain)

    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        """Log pictures, where a tracker takes any. Does not wait."""
        self._hand("write_pictures", step, pictures)

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        """Log files, where a tracker takes any; one that is gone by then is left out, with a warning."""
        self._hand("write_files", step, files)

    def _hand(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Queue values of one kind, which has the name of a tracker's method, for all trackers."""
        self._queue(kind, step, {self._storable(name): value for name, value in values.items()}, self._threads)

    def _queue(self, kind: str, step: int, values: Mapping[str, Any], threads: Sequence[_TrackerThread]) -> None:
        for thread in threads:
            thread.write(kind, step, values, partial(self._write, thread, kind, step, values))

    def _write(self, thread: _TrackerThread, kind: str, step: int, values: Mapping[str, Any], run: TrackerRun) -> None:
        if isinstance(run, _TAKES[kind]):
            there = self._still_there(step, values) if kind == "write_files" else values
            if there or not values:
                thread.write_now(run, kind, step, there)

    def _storable(self, name: str) -> str:
        """Name that every tracker can keep; another than was given is reported."""
        kept = storable(name)
        if kept != name and kept not in self._renamed and self._threads:
            self._renamed.add(kept)
            if len(self._renamed) <= _REPORTED:
                self._warn(f"note: the name {_readable(name)} cannot be kept as it is and is logged as '{kept}'")
            if len(self._renamed) == _REPORTED:
                self._warn("note: further names of this kind are not reported")
        return kept

    def _still_there(self, step: int, files: Mapping[str, Path]) -> Mapping[str, Path]:
        for name, path in files.items():
            if not path.is_file():
                self._warn(f"warning: file '{name}' of step {step} is gone: {path}; no tracker has it")
        return {name: path for name, path in files.items() if path.is_file()}

    def flush(self) -> None:
        """Flush every tracker, so that what was written survives a crash; waits for a limited time."""

        def flush(thread: _TrackerThread) -> Callable[[TrackerRun], None]:
            # What is behind goes on from its last flush, so that the state has to be of then, or later.
            done, keep = thread.backlog.mark(), self._keeps(thread.name)

            def call(run: TrackerRun) -> None:
                if run.flush() is False:
                    thread.say_late(_NOT_YET)
                else:
                    keep(run)
                    done()

            return call

        self._ask(flush)()

    def request_state(self) -> Callable[[], dict[str, State]]:
        """Have every tracker flush, and keep its state at this moment, for a checkpoint that is written meanwhile.

        Does not wait.

        Returns:
            What waits for a limited time, in any thread, and returns the same as :meth:`state` would have.
        """
        # Of now: what follows until the answers are there is no part of the checkpoint. The states second, as a tracker
        # may answer an earlier call in between: they have to be of the last flush, or later.
        behind = self._behind()
        before = dict(self._states)
        states: dict[str, State] = {}
        flushed: set[str] = set()

        def request(thread: _TrackerThread) -> Callable[[TrackerRun], None]:
            done = thread.backlog.mark()

            def call(run: TrackerRun) -> None:
                is_flushed = run.flush() is not False
                self._states[thread.name] = states[thread.name] = _plain_state(run)
                if is_flushed:
                    flushed.add(thread.name)
                    done()
                else:
                    thread.say_late(_NOT_YET)

            return call

        wait = self._ask(request)

        def answer() -> dict[str, State]:
            wait()
            there = flushed.copy()  # a tracker may answer while this is put together
            late = {name: waiting for name, waiting in behind.items() if name not in there}
            # A tracker that still opened had no state then; without one, its run could not be continued.
            return {**self._states, **before, **states, **({BEHIND: late} if late else {})}

        return answer

    def state(self) -> dict[str, State]:
        """States of the trackers by name; of one that failed or is behind, the last that is known.

        Of those that are behind, also what they have not written for sure, as far as JSON can hold it.
        """
        self._ask(lambda thread: self._keeps(thread.name))()
        behind = self._behind()
        return {**self._states, **({BEHIND: behind} if behind else {})}

    def _behind(self) -> dict[str, State]:
        """Backlogs of trackers, by name, as far as they hold anything."""
        waiting = {thread.name: thread.backlog.state() for thread in self._threads if not thread.ended.is_set()}
        return {name: state for name, state in waiting.items() if state["entries"]}

    def _keeps(self, name: str) -> Callable[[TrackerRun], None]:
        def call(run: TrackerRun) -> None:
            self._states[name] = _plain_state(run)

        return call

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """End every run; waits for a limited time."""
        for thread in self._threads:
            thread.close(status)
        seconds = 3 * self._patience
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if not thread.ended.wait(max(0.0, deadline - time.monotonic())):
                self._warn(
                    f"warning: tracker '{thread.name}' has not ended after {seconds:g} s and is left behind; "
                    "its last entries may be missing"
                )
        self._threads = []

    def _ask(self, call: Callable[[_TrackerThread], Callable[[TrackerRun], None]]) -> Callable[[], None]:
        """Have all trackers run a call after all before it; returns what waits, little for those that are late."""
        begin = time.monotonic()
        asked = []
        for thread in self._threads:
            if not thread.is_busy:
                # Libraries are imported while a run opens, and a run that no checkpoint knows cannot be continued.
                patience = self._patience if thread.opened.is_set() else 3 * self._patience
                soon = patience * _SOON if thread.opened.is_set() else patience
                asked.append((thread, 0.0 if thread.is_late else patience, thread.ask(call(thread), soon)))

        def wait() -> None:
            for thread, patience, done in asked:
                if not done.wait(max(0.0, begin + patience - time.monotonic())):
                    thread.is_late = True
                    thread.say_late(f"has not written everything within {patience:g} s, and is not waited for")

        return wait


class _TrackerThread:
    """Thread of one tracker, which makes all calls to it, in order. After a failure it makes none.

    Attributes:
        name: of the tracker.
        opened: the run of the tracker is open, or failed.
        ended: the run of the tracker is closed, or failed.
        backlog: what it has not written for sure.
        is_late: it has not answered soon the last time, or took long for something before.
    """

    def __init__(
        self, name: str, tracker: Tracker, run: RunInfo, state: State | None, warn: Callable[[str], None]
    ) -> None:
        self.name = name
        self.opened = threading.Event()
        self.ended = threading.Event()
        self.backlog = Backlog(run.resumed_step, ROOM)
        self.is_late = False
        self._warn = warn
        self._calls: SimpleQueue[Callable[[TrackerRun], None] | None] = SimpleQueue()
        self._asked = threading.Event()
        self._asked.set()
        self._said_late = False
        self._longest, self._has_written = 0.0, False
        self._left_out = 0
        self._taken: set[tuple[str, str]] = set()  # kinds and names; a name may be that of several kinds
        self._refused: set[tuple[str, str]] = set()
        self._doubts = 0
        work = threading.Thread(target=self._work, args=(tracker, run, state), name=f"d9d-tracker-{name}", daemon=True)
        work.start()

    @property
    def is_busy(self) -> bool:
        """Whether the tracker has not come yet to what it was asked last."""
        return not self._asked.is_set()

    def write(self, kind: str, step: int, values: Mapping[str, Any], call: Callable[[TrackerRun], None]) -> None:
        """Queue a call with values, or leave it out if there is no room."""
        if self.ended.is_set():
            return
        if self._calls.qsize() >= ROOM:
            self._left_out += 1
            self.say_late(f"is {ROOM} entries behind; entries are left out until it has caught up")
            return
        self.backlog.add(kind, step, values)

        def work(run: TrackerRun) -> None:
            call(run)
            self._has_written = True

        self._calls.put(work)

    def write_now(self, run: TrackerRun, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write values in the tracker's thread. A name that it refuses is left out from then on.

        Raises:
            Exception: of the tracker, if the names are not to blame.
        """
        left = {name: value for name, value in values.items() if (kind, name) not in self._refused}
        if values and not left:
            return
        failure = self._failure(run, kind, step, left)
        if failure is None:
            return
        if not left:
            raise failure
        failures: dict[str, Exception] = {}
        # Names that were taken before come first: if these fail too, the backend is to blame.
        for name in sorted(left, key=lambda name: (kind, name) not in self._taken):
            error = self._failure(run, kind, step, {name: left[name]}) if len(left) > 1 else failure
            if error is not None:
                failures[name] = error
                self._doubts += 1
                if self._doubts >= self._most_doubts(kind, left, failures):
                    raise error
        for name, error in failures.items():
            self._refused.add((kind, name))
            self._warn(
                f"warning: tracker '{self.name}' refuses the {_ONE[kind]} {_readable(name)}, which it gets no more: "
                f"{shown(error)}"
            )

    def _failure(self, run: TrackerRun, kind: str, step: int, values: Mapping[str, Any]) -> Exception | None:
        """Write values, and return the exception of the tracker; ``None`` if it took them."""
        try:
            getattr(run, kind)(step, dict(values))
        except Exception as error:
            return error
        self._doubts = 0
        self._taken.update((kind, name) for name in values)
        return None

    def _most_doubts(self, kind: str, values: Collection[str], failures: Collection[str]) -> int:
        """Refusals in a row at which the tracker is switched off."""
        if not self._taken or any((kind, name) in self._taken for name in failures):
            return min(_TRIED, len(values))
        return _DOUBTED

    def ask(self, call: Callable[[TrackerRun], None], soon: float) -> threading.Event:
        """Queue a call; the event happens when it was made or the tracker has failed.

        From then on the tracker is late if that took more seconds than ``soon``, or any call since it was asked before:
        one with slow writes may happen to have nothing to do when it is asked. Nor does asking again, with no write in
        between, show that its writes have become fast.
        """
        done = self._asked = threading.Event()
        begin = time.monotonic()

        def answer(run: TrackerRun) -> None:
            call(run)
            slow = max(self._longest, time.monotonic() - begin) > soon
            self.is_late = slow or (self.is_late and not self._has_written)
            self._longest, self._has_written = 0.0, False
            done.set()

        self._calls.put(answer)
        if self.ended.is_set():
            done.set()
        return done

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Queue the end of the run."""
        if self._left_out and not self.ended.is_set():
            self._warn(f"warning: tracker '{self.name}' was too slow: {self._left_out} entries are left out")
        self._calls.put(lambda run: run.close(status))
        self._calls.put(None)

    def say_late(self, text: str) -> None:
        """Warn, once, that the tracker is behind."""
        if not self._said_late:
            self._said_late = True
            self._warn(f"warning: tracker '{self.name}' {text}; training goes on")

    def _work(self, tracker: Tracker, info: RunInfo, state: State | None) -> None:
        try:
            run = _opened(tracker, info, state)
            self.opened.set()
            while (call := self._calls.get()) is not None:
                begin = time.monotonic()
                call(run)
                self._longest = max(self._longest, time.monotonic() - begin)
        except BaseException as error:  # SystemExit, too, ends this tracker only
            with suppress(Exception):
                self._warn(f"tracker '{self.name}' failed and is switched off: {shown(error)}")
        finally:
            self.opened.set()
            self.ended.set()
            self._asked.set()


def _opened(tracker: Tracker, run: RunInfo, state: State | None) -> TrackerRun:
    opened = tracker.open(run, state)
    lacking = [name for name in ("write", "flush", "state", "close") if not callable(getattr(opened, name, None))]
    if lacking:
        raise TypeError(f"open() returned a {type(opened).__name__}, which lacks {', '.join(lacking)}")
    return opened


def _readable(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:80]}...")


def _plain_state(run: TrackerRun) -> State:
    text = json.dumps(run.state(), allow_nan=False, ensure_ascii=False)
    # Half of a surrogate pair fails here, and not where the checkpoint is written, which would end the run.
    state: State = json.loads(text.encode())
    return state

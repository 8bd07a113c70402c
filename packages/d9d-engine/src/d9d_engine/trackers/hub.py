"""Hub of a run's trackers, with a thread for each, so that a failing or slow tracker cannot stop or delay training."""

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

#: Largest number of pending calls for one tracker; further entries are dropped until it has caught up.
ROOM = 1000
#: Key, next to tracker names, of the pending entries in a checkpoint.
BEHIND = "(behind)"
#: Fraction of the patience after which an answering tracker counts as late. A checkpoint has the pending entries of a
#: late tracker, so little is gained by making all ranks wait for it again and again.
_SOON = 0.02
_NOT_YET = "has not written everything yet"
#: Largest number of invalid names that are reported; a dataset may have a million invalid labels.
_REPORTED = 10
#: Number of consecutive refused values after which a tracker is switched off. The second number applies if all these
#: values have new names and the tracker has accepted other names before.
_TRIED, _DOUBTED = 3, 10

#: Kind of values (name of the method that writes it) -> protocol of runs that support it.
_TAKES: Mapping[str, type] = {
    "write": object,
    "write_tables": TakesTables,
    "write_histograms": TakesHistograms,
    "write_texts": TakesTexts,
    "write_pictures": TakesPictures,
    "write_files": TakesFiles,
}
#: Kind of values -> noun for messages.
_ONE: Mapping[str, str] = {
    "write": "number",
    "write_tables": "table",
    "write_histograms": "histogram",
    "write_texts": "text",
    "write_pictures": "picture",
    "write_files": "file",
}


class TrackerHub:
    """Forwards logged values to every tracker, each in its own thread.

    Args:
        trackers: name of a tracker, unique within the job -> tracker.
        warn: prints a line; called in any thread.
        patience: seconds that :meth:`flush`, :meth:`state` and the answer to :meth:`request_state` wait for all
            trackers together; three times as long while a tracker opens, and in :meth:`close`. A late tracker is not
            waited for until it again answers within a fiftieth of that time, with no slower call in between.
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
        """Whether there are no trackers, as on all ranks but the first."""
        return not self._trackers

    def open(self, run: RunInfo, states: Mapping[str, Any]) -> None:
        """Open every tracker, with its state from a checkpoint if there is one. Does not wait.

        A tracker that was behind at the checkpoint continues from its last flushed step, and gets later entries again.
        """
        self._states = {name: state for name, state in states.items() if name != BEHIND}
        behind = states.get(BEHIND, {})
        self._threads = []
        for name, tracker in self._trackers.items():
            step = behind[name]["step"] if name in behind else run.resumed_step
            info = replace(run, resumed_step=step)
            self._threads.append(_TrackerThread(name, tracker, info, self._states.get(name), self._warn))
            for kind, at, values in Backlog.read(behind[name]["entries"]) if name in behind else ():
                self._queue(kind, at, values, self._threads[-1:])  # with the names that the tracker got before

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Log values after ``step`` steps. Does not wait."""
        self._hand("write", step, dict(values))

    def write_tables(self, step: int, tables: Mapping[str, Table]) -> None:
        """Log tables after ``step`` steps, to trackers that support tables. Does not wait."""
        self._hand("write_tables", step, tables)

    def write_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Log histograms, to trackers that support histograms. Does not wait."""
        self._hand("write_histograms", step, histograms)

    def write_texts(self, step: int, texts: Mapping[str, str]) -> None:
        """Log texts, to trackers that support texts; unpaired surrogates are escaped. Does not wait."""
        # Neither UTF-8 files nor checkpoints, which save pending entries, can hold unpaired surrogates.
        plain = {name: text.encode(errors="backslashreplace").decode() for name, text in texts.items()}
        self._hand("write_texts", step, plain)

    def write_pictures(self, step: int, pictures: Mapping[str, Tensor]) -> None:
        """Log pictures, to trackers that support pictures. Does not wait."""
        self._hand("write_pictures", step, pictures)

    def write_files(self, step: int, files: Mapping[str, Path]) -> None:
        """Log files, to trackers that support files; if a file no longer exists, print a warning and drop it."""
        self._hand("write_files", step, files)

    def _hand(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Queue values of one kind for all trackers; the kind is the name of a tracker's method."""
        self._queue(kind, step, {self._storable(name): value for name, value in values.items()}, self._threads)

    def _queue(self, kind: str, step: int, values: Mapping[str, Any], threads: Sequence[_TrackerThread]) -> None:
        for thread in threads:
            thread.write(kind, step, values, partial(self._write, thread, kind, step, values))

    def _write(self, thread: _TrackerThread, kind: str, step: int, values: Mapping[str, Any], run: TrackerRun) -> None:
        if isinstance(run, _TAKES[kind]):
            there = self._existing_files(step, values) if kind == "write_files" else values
            if there or not values:
                thread.write_now(run, kind, step, there)

    def _storable(self, name: str) -> str:
        """Escape a name so that every tracker can store it; print a warning if this changes the name."""
        kept = storable(name)
        if kept != name and kept not in self._renamed and self._threads:
            self._renamed.add(kept)
            if len(self._renamed) <= _REPORTED:
                self._warn(f"note: the name {_readable(name)} cannot be stored and is logged as '{kept}'")
            if len(self._renamed) == _REPORTED:
                self._warn("note: further names of this kind are not reported")
        return kept

    def _existing_files(self, step: int, files: Mapping[str, Path]) -> Mapping[str, Path]:
        for name, path in files.items():
            if not path.is_file():
                self._warn(f"warning: file '{name}' of step {step} is missing: {path}; it is not logged")
        return {name: path for name, path in files.items() if path.is_file()}

    def flush(self) -> None:
        """Flush every tracker, so that logged values survive a crash; waits for a limited time."""

        def flush(thread: _TrackerThread) -> Callable[[TrackerRun], None]:
            # A tracker that is behind continues from its last flush, so its saved state must not be older.
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
        """Request a flush and the current state of every tracker, for a checkpoint that is written in the background.

        Does not wait.

        Returns:
            Function that waits for a limited time, in any thread, and returns the states like :meth:`state`.
        """
        # The checkpoint includes entries up to now only. Read backlogs before states, as a tracker may answer an
        # earlier call in between: a state must not be older than the last flush.
        behind = self._backlogs()
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
            there = flushed.copy()  # a tracker may answer concurrently
            late = {name: waiting for name, waiting in behind.items() if name not in there}
            # A tracker that is still opening gets its previous state, without which its run could not be continued.
            return {**self._states, **before, **states, **({BEHIND: late} if late else {})}

        return answer

    def state(self) -> dict[str, State]:
        """States of the trackers by name; for a tracker that failed or did not answer in time, its last known state.

        The key :data:`BEHIND` holds the backlogs: for each running tracker, its entries since its last flush, if there
        are any and JSON can represent them.
        """
        self._ask(lambda thread: self._keeps(thread.name))()
        behind = self._backlogs()
        return {**self._states, **({BEHIND: behind} if behind else {})}

    def _backlogs(self) -> dict[str, State]:
        """Non-empty backlogs of the trackers, by name."""
        waiting = {thread.name: thread.backlog.state() for thread in self._threads if not thread.ended.is_set()}
        return {name: state for name, state in waiting.items() if state["entries"]}

    def _keeps(self, name: str) -> Callable[[TrackerRun], None]:
        def call(run: TrackerRun) -> None:
            self._states[name] = _plain_state(run)

        return call

    def close(self, status: Literal["finished", "stopped", "failed"]) -> None:
        """Close every tracker's run; waits for a limited time."""
        for thread in self._threads:
            thread.close(status)
        seconds = 3 * self._patience
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            if not thread.ended.wait(max(0.0, deadline - time.monotonic())):
                self._warn(
                    f"warning: tracker '{thread.name}' did not end within {seconds:g} s and was abandoned; "
                    "its last entries may be missing"
                )
        self._threads = []

    def _ask(self, call: Callable[[_TrackerThread], Callable[[TrackerRun], None]]) -> Callable[[], None]:
        """Queue a call for all trackers; return a function that waits for the calls, except to late trackers."""
        begin = time.monotonic()
        asked = []
        for thread in self._threads:
            if not thread.is_busy:
                # Opening imports libraries, and a run whose state is in no checkpoint cannot be continued, so wait
                # longer.
                patience = self._patience if thread.opened.is_set() else 3 * self._patience
                soon = patience * _SOON if thread.opened.is_set() else patience
                asked.append((thread, 0.0 if thread.is_late else patience, thread.ask(call(thread), soon)))

        def wait() -> None:
            for thread, patience, done in asked:
                if not done.wait(max(0.0, begin + patience - time.monotonic())):
                    thread.is_late = True
                    limit = f"within {patience:g} s" if patience else "at once, after slow calls,"
                    thread.say_late(f"has not written everything {limit} and is no longer waited for")

        return wait


class _TrackerThread:
    """Thread of one tracker, which makes all calls to the tracker, in order; none after a failure.

    Attributes:
        name: name of the tracker.
        opened: set once the tracker's run is open or has failed.
        ended: set once the tracker's run is closed or has failed.
        backlog: entries that the tracker may not have written.
        is_late: whether the tracker's last answer, or a call before the answer, was slow.
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
        self._taken: set[tuple[str, str]] = set()  # (kind, name) pairs; several kinds may use one name
        self._refused: set[tuple[str, str]] = set()
        self._doubts = 0
        work = threading.Thread(target=self._work, args=(tracker, run, state), name=f"d9d-tracker-{name}", daemon=True)
        work.start()

    @property
    def is_busy(self) -> bool:
        """Whether the thread still works on a queued request."""
        return not self._asked.is_set()

    def write(self, kind: str, step: int, values: Mapping[str, Any], call: Callable[[TrackerRun], None]) -> None:
        """Queue a call with values, or drop it if the queue is full."""
        if self.ended.is_set():
            return
        if self._calls.qsize() >= ROOM:
            self._left_out += 1
            self.say_late(f"is {ROOM} entries behind; entries are dropped until it has caught up")
            return
        self.backlog.add(kind, step, values)

        def work(run: TrackerRun) -> None:
            call(run)
            self._has_written = True

        self._calls.put(work)

    def write_now(self, run: TrackerRun, kind: str, step: int, values: Mapping[str, Any]) -> None:
        """Write values in the tracker's thread. A refused name is left out from then on.

        Raises:
            Exception: exception of the tracker, if names of values are not its cause.
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
        # First try names that the tracker has accepted before: if these fail too, the backend is the cause.
        for name in sorted(left, key=lambda name: (kind, name) not in self._taken):
            error = self._failure(run, kind, step, {name: left[name]}) if len(left) > 1 else failure
            if error is not None:
                failures[name] = error
                self._doubts += 1
                if self._doubts >= self._allowed_refusals(kind, left, failures):
                    raise error
        for name, error in failures.items():
            self._refused.add((kind, name))
            self._warn(
                f"warning: tracker '{self.name}' refuses the {_ONE[kind]} {_readable(name)}, which is no longer sent: "
                f"{shown(error)}"
            )

    def _failure(self, run: TrackerRun, kind: str, step: int, values: Mapping[str, Any]) -> Exception | None:
        """Call the tracker's method to write values; return its exception, or ``None``."""
        try:
            getattr(run, kind)(step, dict(values))
        except Exception as error:
            return error
        self._doubts = 0
        self._taken.update((kind, name) for name in values)
        return None

    def _allowed_refusals(self, kind: str, values: Collection[str], failures: Collection[str]) -> int:
        """Number of consecutive refusals at which the tracker is switched off."""
        if not self._taken or any((kind, name) in self._taken for name in failures):
            return min(_TRIED, len(values))
        return _DOUBTED

    def ask(self, call: Callable[[TrackerRun], None], soon: float) -> threading.Event:
        """Queue a request; the event is set when it was made or the tracker has failed.

        Afterwards the tracker is late if the request, or any call since the previous request, took more than ``soon``
        seconds. A late tracker stays late until a write was made in between: a request without a write does not show
        that writes have become fast.
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
        """Queue the end of the tracker's run."""
        if self._left_out and not self.ended.is_set():
            self._warn(f"warning: tracker '{self.name}' was too slow: {self._left_out} entries were dropped")
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
        except BaseException as error:  # even SystemExit must end this tracker only
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
        raise TypeError(f"open() returned a {type(opened).__name__} without the methods {', '.join(lacking)}; add them")
    return opened


def _readable(name: str) -> str:
    return ascii(name if len(name) <= 80 else f"{name[:80]}...")


def _plain_state(run: TrackerRun) -> State:
    text = json.dumps(run.state(), allow_nan=False, ensure_ascii=False)
    # An unpaired surrogate must fail here: in the checkpoint's thread, the error would end the run.
    state: State = json.loads(text.encode())
    return state

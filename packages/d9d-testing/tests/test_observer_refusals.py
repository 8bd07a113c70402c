"""Refusals and skips of the suites of trackers and subscribers, with stand-ins: no training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_core import events as ev
from d9d_testing.suites import subscriber as subscriber_suite
from d9d_testing.suites import tracker as tracker_suite
from d9d_testing.suites.subscriber import SubscriberSuite
from d9d_testing.suites.tracker import TrackerSuite


def skipped(reason: str) -> Any:
    return pytest.raises(pytest.skip.Exception, match=reason)


# --- trackers


class Memory(TrackerSuite):
    """Suite of a tracker that keeps its values; a resumed run drops the values after its step, or writes on."""

    kept: Mapping[int, Any]

    def build(self, **_: Any) -> Any:
        return None

    def opened(self, directory: Path, resumed_step: int = 0, state: Any = None) -> Any:
        values = self.values
        if self.rewinds:
            for step in [step for step in values if step > resumed_step]:
                del values[step]
        return SimpleNamespace(
            write=values.__setitem__, flush=lambda: None, state=lambda: {"id": 1},
            close=lambda _status: None,
        )  # fmt: skip

    def crash(self, run: Any) -> None:
        pass

    def logged(self, directory: Path) -> Any:
        return self.lost(dict(self.values))

    def __init__(self, rewinds: bool, lost: Any = lambda logged: logged) -> None:
        self.values: dict[int, Any] = {}
        self.lost = lost
        type(self).rewinds = rewinds


def without(*steps: int) -> Any:
    return lambda logged: {step: values for step, values in logged.items() if step not in steps}


@pytest.mark.parametrize(
    ("rewinds", "lost", "says"),
    [
        (True, without(), None), (False, without(), None), (False, without(6), None),
        (False, without(4), "resumed, logged are"), (False, without(1), "resumed, logged are"),
        (False, without(5), "resumed at step 4 and written after step 5, logged are"),
        (False, lambda logged: logged | {7: {}}, "logged are steps that were never written"),
        (False, lambda logged: logged | {0: {}}, "logged are steps that were never written"),
        (True, without(4), "resumed at step 4, logged are"), (True, lambda logged: logged | {6: {}}, "remove entries"),
        (True, lambda logged: logged | {5: {"loss": 1.0}}, "expected .*5: {'loss': 2.0}"),
    ],
)  # fmt: skip
def test_a_resumed_tracker_has_the_steps_before_the_checkpoint_and_the_repeated_one(
    rewinds: bool, lost: Any, says: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracker_suite, "_bury", lambda _run: None)
    suite = Memory(rewinds, lost)
    if says is None:
        suite.test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path)
    else:
        with pytest.raises(AssertionError, match=says):
            suite.test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path)


def test_a_resumed_tracker_that_cannot_be_read_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_suite, "_bury", lambda _run: None)
    with skipped("Memory.logged does not say how to read back what was logged"):
        Memory(True, lambda _logged: None).test_a_resumed_run_drops_what_came_after_the_checkpoint(tmp_path)


class Killed(TrackerSuite):
    """Suite of a tracker whose process is killed by a stand-in."""

    flushed: Any = None
    reports = True

    def address(self) -> Any:
        return "tracker", "plugin", "target", {"a": 1}

    def opened(self, directory: Path, resumed_step: int = 0, state: Any = None) -> Any:
        assert (directory.name, resumed_step, state) == ("run", 3, {"id": 1})
        return SimpleNamespace(write=lambda *given: self.written.append(given), close=lambda _status: None)

    def read(self, directory: Path) -> Any:
        return self.found | dict(self.written)

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.found: dict[int, Any] = {step: {"loss": float(step)} for step in (1, 2, 3)}


def killed(suite: Killed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class World:
        def __init__(self, size: int) -> None:
            assert size == 1

        def run(self, _function: Any, address: Any, directory: str, steps: Any) -> None:
            assert (address[3], steps) == ({"a": 1, **suite.fields(Path(directory))}, [1, 2, 3])
            if suite.reports:
                report = {"flushed": suite.flushed, "state": {"id": 1}}
                (Path(directory) / tracker_suite.REPORT).write_text(json.dumps(report))

    monkeypatch.setattr(tracker_suite, "World", World)
    suite.test_a_killed_process_loses_nothing_that_was_flushed(tmp_path)


def test_values_that_were_flushed_survive_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    killed(Killed(), tmp_path, monkeypatch)
    assert not (tmp_path / "run" / tracker_suite.REPORT).exists()
    for number, (faults, says) in enumerate([
        ({"found": {1: {"loss": 1.0}}}, "after a kill behind flush.., and a resumed run that writes step 4"),
        ({"reports": False}, "the process was killed before flush.. and state.. returned"),
    ]):  # fmt: skip
        suite = Killed()
        vars(suite).update(faults)
        (tmp_path / str(number)).mkdir()
        with pytest.raises(AssertionError, match=says):
            killed(suite, tmp_path / str(number), monkeypatch)
    later = tmp_path / "later"
    later.mkdir()
    suite = Killed()
    suite.flushed = False
    with skipped("flush.. returns False, so the checkpoint keeps the values"):
        killed(suite, later, monkeypatch)
    with skipped("Memory overrides build.., so another process cannot build the tracker"):
        Memory(True).test_a_killed_process_loses_nothing_that_was_flushed(tmp_path)
    suite.dies_in_process = False  # type: ignore[misc]
    with skipped("Killed.dies_in_process is False"):
        suite.test_a_killed_process_loses_nothing_that_was_flushed(tmp_path)


@pytest.mark.parametrize("found", [{1: {"loss": 1.0}}, {}])
def test_a_flushed_value_is_found_by_a_reader(found: dict[int, Any], tmp_path: Path) -> None:
    happened: list[Any] = []
    suite = Killed()
    suite.found = found
    run = SimpleNamespace(
        write=lambda *given: happened.append(given), flush=lambda: happened.append("flush"), close=happened.append
    )
    suite.opened = lambda _directory: run  # type: ignore[method-assign]
    if found:
        suite.test_a_flush_keeps_what_was_written(tmp_path)
    else:
        with pytest.raises(AssertionError, match="after flush.., logged are {}; write out buffers"):
            suite.test_a_flush_keeps_what_was_written(tmp_path)
    assert happened == [(1, {"loss": 1.0}), "flush", "finished"]


# --- subscribers


class Watching(SubscriberSuite):
    """Suite of a subscriber with given subscriptions."""

    pairs: Any = ()

    def build(self, **_: Any) -> Any:
        return self

    def watching(self, _directory: Path) -> Any:
        return SimpleNamespace(subscriptions=lambda: self.pairs)


def test_subscriptions_are_events_and_functions_of_one_argument(tmp_path: Path) -> None:
    for pairs, says in (
        ([(ev.StepEnds, lambda event: None)], None), ([], "subscriptions.. is empty; yield pairs of an event"),
        ([(int, print)], "subscribes to <class 'int'>, which is not an event; events are: "),
        ([(ev.StepEnds, 3)], "the handler of StepEnds is 3; give a function"),
        ([(ev.StepEnds, lambda: None)], "the handler of StepEnds must take the event only"),
        ([(ev.StepEnds, lambda event, more: None)], "the handler of StepEnds must take the event only"),
    ):  # fmt: skip
        suite = Watching()
        suite.pairs = pairs
        if says is None:
            suite.test_it_subscribes_to_events_that_exist(tmp_path)
        else:
            with pytest.raises(AssertionError, match=says):
                suite.test_it_subscribes_to_events_that_exist(tmp_path)


def test_handlers_that_break_have_to_end_the_run(tmp_path: Path) -> None:
    suite = Watching()
    ran: list[str] = []

    def trained(directory: Path, _subscribers: Any) -> None:
        ran.append(directory.name)
        if len(ran) == 1:
            raise KeyError

    suite.trained = trained  # type: ignore[method-assign, assignment]
    suite.broken_fields = lambda _directory: {"a": 1}  # type: ignore[method-assign]
    suite.test_what_it_raises_ends_the_run(tmp_path)
    with pytest.raises(
        AssertionError, match="with {'a': 1} the run succeeds; handlers must not catch their exceptions"
    ):
        suite.test_what_it_raises_ends_the_run(tmp_path)
    assert ran == ["run", "run"]
    suite.broken_fields = lambda _directory: None  # type: ignore[method-assign]
    with skipped("Watching.broken_fields returns no fields with which a handler fails"):
        suite.test_what_it_raises_ends_the_run(tmp_path)


def test_reads_of_handlers_are_counted_by_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []

    class Reads:
        def __enter__(self) -> Any:
            found.clear()
            self.found = found
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(subscriber_suite, "HostReads", Reads)
    inner = SimpleNamespace(
        subscriptions=lambda: [(ev.StepEnds, lambda _: found.extend("ab")), (ev.StepStarts, lambda _: None)]
    )
    watched = subscriber_suite._Watched(inner)
    (_, ends), (_, starts) = watched.subscriptions()
    ends(None)
    starts(None)
    ends(None)
    assert watched.reads == {"StepEnds": 4}
    suite = Watching()
    suite.pairs = list(watched.subscriptions())
    suite.trained = lambda _directory, subscribers: [  # type: ignore[method-assign, assignment]
        handler(None) for one in subscribers for _, handler in one.subscriptions()
    ]
    with pytest.raises(AssertionError, match="handlers read values of tensors on the host: {'StepEnds': 2}; take"):
        suite.test_handlers_never_wait_for_the_device(tmp_path)
    suite.pairs = suite.pairs[1:]
    suite.test_handlers_never_wait_for_the_device(tmp_path)
    suite.waits = True  # type: ignore[misc]
    with skipped("Watching.waits is True"):
        suite.test_handlers_never_wait_for_the_device(tmp_path)


def test_files_are_compared_where_other_processes_can_build_the_subscriber(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with skipped("Watching overrides build.., so other processes cannot build the subscriber"):
        Watching().files_of_one_process(tmp_path)
    runs: list[Any] = []
    monkeypatch.setattr(subscriber_suite, "watched_run", lambda *given: runs.append(given))

    class Writes(SubscriberSuite):
        def job_for_files(self, directory: Path) -> Any:
            return directory, "plugins", "address"

        def files(self, directory: Path) -> Any:
            return self.found

        found: Any = {}

    with skipped("the subscriber writes no files in directory or in the run's directory"):
        Writes().files_of_one_process(tmp_path)
    Writes.found = {"a": b"x"}
    assert Writes().files_of_one_process(tmp_path) == {"a": b"x"}
    assert runs == [(tmp_path, "plugins", "address")] * 2
    with pytest.raises(AssertionError, match="a run that an observer interrupts goes on"):
        Writes().test_files_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path)

    def interrupted(*given: Any) -> None:
        runs.append(given)
        if len(given) == 4:
            assert given[3]._step == 5
            for step in (3, 4, 5, 8):
                (given[0] / "suite" / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
            raise subscriber_suite.Interruption

    monkeypatch.setattr(subscriber_suite, "watched_run", interrupted)
    runs.clear()
    Writes().test_files_of_a_resumed_run_are_those_of_an_uninterrupted_one(tmp_path)
    assert [(given[0].name, len(given)) for given in runs] == [("one", 3), ("resumed", 4), ("resumed", 3)]
    left = (tmp_path / "resumed" / "suite" / "checkpoints").iterdir()
    assert sorted(path.name for path in left) == ["step-00000003", "step-00000004"]

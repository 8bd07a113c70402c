"""Conformance suite of trackers: life cycle of a run, resume, all kinds of values, and failing backends."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.metric import Table
from d9d_core.tracker import (
    Histogram,
    RunInfo,
    SeriesName,
    TakesFiles,
    TakesHistograms,
    TakesPictures,
    TakesTables,
    TakesTexts,
)
from d9d_engine.trackers.hub import TrackerHub

from d9d_testing.suites.support.component import ComponentSuite, plain_json
from d9d_testing.suites.support.killed_runs import REPORT, killed_run
from d9d_testing.world import RankFailedError, World

_VALUES = {"loss": 1.5, "lr": 1e-3, "eval/loss": math.nan, "grad_norm": math.inf}
#: Step -> series -> value, as read back from a backend.
Logged = Mapping[int, Mapping[str, float | None]]
#: Further kinds of values -> protocol of a run that accepts them, and a function that returns an example.
_KINDS: Mapping[str, tuple[type, Callable[[], Any]]] = {
    "histograms": (TakesHistograms, lambda: Histogram(torch.tensor([1.0, 0.0, 3.0]), -1.0, 2.0)),
    "texts": (TakesTexts, lambda: "a text\nof two *lines*"),
    "pictures": (TakesPictures, lambda: torch.arange(36, dtype=torch.uint8).reshape(4, 3, 3)),
}


#: Names of series that may result from labels of a dataset: paths, control characters, half a surrogate pair, hundreds
#: of characters.
_ODD_NAMES = (
    *(".", "..", "", "f1/.", "a//b", "/a", "a/", "a/../b", "-", " a ", "_step", "step", "a\\b", "a:b", "a%2Fb", "100%"),
    *("nul\0", "bell\a\x1b[31m", "a\nb", "half \ud800", "\N{HIRAGANA LETTER A}" * 100, "x" * 10_000, "x" * 10_001),
)


def by_step(points: Iterable[tuple[int, str, float | None]]) -> Logged:
    """Group the points of a backend (step, series, value) by step.

    Raises:
        AssertionError: a series has two values for one step.
    """
    found: dict[int, dict[str, float | None]] = {}
    for step, name, value in points:
        values = found.setdefault(step, {})
        assert name not in values, (
            f"series '{name}' has step {step} twice; a resumed run must remove steps after RunInfo.resumed_step, or "
            "skip steps that the backend already has"
        )
        values[name] = value
    return found


class TrackerSuite(ComponentSuite):
    """Conformance suite of trackers (:class:`d9d_core.tracker.Tracker`).

    Subclass it, name the tracker, and implement reading logged values back::

        class TestMyTracker(TrackerSuite):
            target = "my_tracker"

            def fields(self, directory):
                return {"path": str(directory / "log")}

            def logged(self, directory):
                return {entry["step"]: entry["values"] for entry in read(directory / "log")}

    Each run has ``directory`` as its run directory.

    Attributes:
        patience: largest number of seconds that a call may take, also if the backend does not answer.
        dies_in_process: whether the suite may kill a run in another process, and read its logged values in this one;
            ``False`` for trackers whose backend is replaced by a stand-in in this process.
        rewinds: whether the backend can remove entries after a checkpoint's step; if not, they stay, and no step of a
            series may be written twice.
    """

    kind = "tracker"

    patience: ClassVar[float] = 2.0
    dies_in_process: ClassVar[bool] = True
    rewinds: ClassVar[bool] = True

    # --- for subclasses to override

    def fields(self, directory: Path) -> Mapping[str, Any]:  # noqa: ARG002 - for subclasses
        """Config fields of the tracker, which may write into ``directory``."""
        return {}

    def default_fields(self) -> Mapping[str, Any]:
        """Config fields that must be set: fields without a default, or whose default needs an account or a network."""
        return {}

    def broken_fields(self, directory: Path) -> Mapping[str, Any] | None:
        """Config fields with which the backend fails or does not answer, such as a closed port.

        By default the result of ``fields``; the run's directory cannot be created in that test. ``None`` if the tracker
        has no backend that can fail.
        """
        return self.fields(directory)

    def logged(self, directory: Path) -> Logged | None:  # noqa: ARG002 - for subclasses
        """Values that the backend stores for the run, by step; ``None`` if they cannot be read back.

        :func:`by_step` groups single points, and finds duplicates. If the backend has several runs for the directory,
        return the last run.
        """
        return None

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]] | None:  # noqa: ARG002 - for subclasses
        """Names of the tables that the backend stores for the run, by step; ``None`` if they cannot be read back."""
        return None

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]] | None:  # noqa: ARG002
        """Names of the ``histograms``, ``texts`` or ``pictures`` that the backend stores for the run, by step.

        ``None`` if they cannot be read back.
        """
        return None

    def logged_contents(self, directory: Path, kind: str) -> Mapping[int, Mapping[str, Any]] | None:  # noqa: ARG002
        """Contents that the backend stores for the run: step -> name -> content; ``None`` if they cannot be read back.

        A content is, by kind: of ``texts`` a string, of ``histograms`` the list of counts, of ``pictures`` nested lists
        [height, width, 3] of integers, of ``tables`` a list of rows ``[name of the row, *values]`` with ``None`` for
        NaN.
        """
        return None

    def logged_file(self, directory: Path, name: str) -> bytes | None:  # noqa: ARG002 - for subclasses
        """Content of a file that the backend stores for the run; ``None`` if it cannot be read back."""
        return None

    def crash(self, run: Any) -> None:
        """Simulate the death of a run's process; by default, do nothing.

        Override it for backends that refuse to continue a run that is still open in this process.
        """

    # --- tests

    @pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
    def test_a_run_is_opened_written_and_closed(self, tmp_path: Path, status: Any) -> None:
        """Between open and close, a run accepts writes of any values, and of none."""
        for steps in ((), (1, 5, 5)):
            hub, notes = self.hub(self.fields(tmp_path))
            hub.open(self.run_info(tmp_path), {})
            for step in steps:
                hub.write(step, _VALUES)
                hub.write(step, {})
            hub.flush()
            hub.state()
            hub.close(status)
            assert not notes, f"with writes after steps {list(steps)}, closed as {status}: {notes[0]}"

    def test_what_is_written_is_kept(self, tmp_path: Path) -> None:
        """All series of each step are stored, with their values at the time of the call."""
        run = self.opened(tmp_path)
        for step in (1, 2, 3):
            values = {"loss": float(step), "lr": 0.5 * step}
            run.write(step, values)
            assert values == {"loss": float(step), "lr": 0.5 * step}, (
                f"write() changes the values it is given: {values}"
            )
            values.update(loss=-1.0)
        run.close("finished")
        logged = self.read(tmp_path)
        expected = {step: {"loss": float(step), "lr": 0.5 * step} for step in (1, 2, 3)}
        assert logged == expected, f"logged are {logged}, written were {expected}"

    def test_a_flush_keeps_what_was_written(self, tmp_path: Path) -> None:
        """After ``flush``, a reader finds everything, because a crash may follow."""
        run = self.opened(tmp_path)
        run.write(1, {"loss": 1.0})
        run.flush()
        logged = self.read(tmp_path)
        run.close("finished")
        assert logged == {1: {"loss": 1.0}}, f"after flush(), logged are {logged}; write out buffers"

    def test_a_killed_process_loses_nothing_that_was_flushed(self, tmp_path: Path) -> None:
        """After ``flush``, a kill of the process loses no value, and a run in a new process continues."""
        if type(self).build is not ComponentSuite.build:
            pytest.skip(f"{type(self).__name__} overrides build(), so another process cannot build the tracker")
        if not self.dies_in_process:
            pytest.skip(f"{type(self).__name__}.dies_in_process is False")
        directory = tmp_path / "run"
        directory.mkdir()
        kind, plugin, target, config = self.address()
        address = [kind, plugin, target, {**config, **self.fields(directory)}]
        with suppress(RankFailedError):
            World(1).run(killed_run, address, str(directory), [1, 2, 3])
        report = directory / REPORT
        assert report.is_file(), "the process was killed before flush() and state() returned"
        flushed = json.loads(report.read_text())
        report.unlink()
        if flushed["flushed"] is False:
            pytest.skip("flush() returns False, so the checkpoint keeps the values")
        expected: dict[int, Any] = {step: {"loss": float(step)} for step in (1, 2, 3)}
        hint = (
            "flush() must hand everything to the operating system or the backend: commit transactions, wait for own "
            "threads, and leave nothing in caches of the process; and a resumed run must remove entries after "
            "RunInfo.resumed_step, no others"
        )
        again = self.opened(directory, resumed_step=3, state=flushed["state"])
        again.write(4, {"loss": 4.0})
        again.close("finished")
        logged = self.read(directory)
        assert logged == expected | {4: {"loss": 4.0}}, (
            f"after a kill behind flush(), and a resumed run that writes step 4, logged are {logged}; {hint}"
        )

    def test_a_resumed_run_drops_what_came_after_the_checkpoint(self, tmp_path: Path) -> None:
        """Steps after the checkpoint of a crashed run are removed and repeated; earlier entries stay.

        Without ``rewinds``, later entries stay too.
        """
        run = self.opened(tmp_path)
        for step in (1, 2, 3, 4):
            run.write(step, {"loss": 1.0})
        run.flush()
        state = plain_json(run.state(), "state()")
        for step in (5, 6):
            run.write(step, {"loss": 1.0})
        self.crash(run)
        again = self.opened(tmp_path, resumed_step=4, state=state)
        assert plain_json(again.state(), "state()") == state, (
            f"a resumed run has state {again.state()!r}, saved was {state!r}; continue the run whose state open() gets"
        )
        again.write(5, {"loss": 2.0})
        again.close("finished")
        logged = self.logged(tmp_path)
        _bury(run)
        if logged is None:
            pytest.skip(f"{type(self).__name__}.logged does not say how to read back what was logged")
        if not self.rewinds:
            assert [logged.get(step) for step in (1, 2, 3, 4)] == [{"loss": 1.0}] * 4, f"resumed, logged are {logged}"
            assert 5 in logged, f"resumed at step 4 and written after step 5, logged are {logged}"
            assert not logged.keys() - {1, 2, 3, 4, 5, 6}, f"logged are steps that were never written: {logged}"
            return
        expected = {step: {"loss": 2.0 if step == 5 else 1.0} for step in (1, 2, 3, 4, 5)}
        assert logged == expected, (
            f"resumed at step 4, logged are {logged}, expected {expected}; remove entries after RunInfo.resumed_step"
        )

    def test_a_new_run_begins_empty(self, tmp_path: Path) -> None:
        """A new run has no entries of an earlier run in the same directory."""
        for loss in (1.0, 2.0):
            run = self.opened(tmp_path)
            run.write(int(loss), {"loss": loss})
            run.close("failed")
        logged = self.read(tmp_path)
        assert logged == {2: {"loss": 2.0}}, f"a new run at step 0 has {logged}; resumed_step = 0 must start empty"

    def test_writes_after_close_are_refused_or_lost(self, tmp_path: Path) -> None:
        """Calls after ``close`` raise or do nothing, a second ``close`` included."""
        run = self.opened(tmp_path)
        run.write(1, {"loss": 1.0})
        run.close("finished")
        before = self.logged(tmp_path)
        for call in (lambda: run.write(2, {"loss": 2.0}), run.flush, lambda: run.close("failed")):
            with suppress(Exception):
                call()
        after = self.logged(tmp_path)
        assert after == before, f"after close(), writes change what was logged from {before} to {after}"

    def test_state_is_plain_data(self, tmp_path: Path) -> None:
        """The state of a run consists of JSON values for a checkpoint, before the first write and later."""
        run = self.opened(tmp_path)
        for step in (0, 1):
            if step:
                run.write(step, _VALUES)
            state = plain_json(run.state(), "state()")
            assert isinstance(state, dict), f"state() is {state!r}; return a mapping, possibly empty"
        run.close("finished")

    def test_a_backend_that_fails_ends_no_process_and_holds_up_no_call(self, tmp_path: Path) -> None:
        """Each call to a failing backend returns or raises an ``Exception`` within ``patience`` seconds; one raises.

        The loop waits for pending calls at checkpoints and at its end.
        """
        file = tmp_path / "no directory"
        file.write_text("")
        fields = self.broken_fields(tmp_path)
        if fields is None:
            pytest.skip(f"{type(self).__name__}.broken_fields returns no fields with which a backend fails")
        tracker, run = self.build(**fields), None

        def opened() -> None:
            nonlocal run
            run = tracker.open(self.run_info(file), None)

        calls: dict[str, Callable[[Any], object]] = {
            "open": lambda _: opened(),
            "write": lambda run: run.write(1, _VALUES),
            "write_tables": lambda run: (
                run.write_tables(1, {"load": _table()}) if isinstance(run, TakesTables) else None
            ),
            "flush": lambda run: run.flush(),
            "state": lambda run: run.state(),
            "close": lambda run: run.close("failed"),
        }
        failed: list[str] = []
        for name, call in calls.items():
            begin = time.perf_counter()
            try:
                call(run)
            except Exception:
                failed.append(name)
            except BaseException as error:
                raise AssertionError(
                    f"{name}() raises {error!r}, which would end the process; raise an Exception"
                ) from error
            seconds = time.perf_counter() - begin
            assert seconds <= self.patience, (
                f"{name}() takes {seconds:.1f} s although the backend does not answer, and the run waits for it at its "
                f"end; give it a time limit below {self.patience:g} s"
            )
            if run is None:
                assert failed, "open() returns None although the backend fails; raise an Exception"
                return
        assert failed, "no call raises although the backend fails; raise an Exception, so that the run reports it"

    def test_tables_are_taken_as_they_are(self, tmp_path: Path) -> None:
        """Tables with NaN and row names are stored, and not changed; tables of later steps are removed on resume."""
        run: Any = self.opened(tmp_path)
        takes_tables = isinstance(run, TakesTables)
        if not takes_tables:
            run.close("finished")
            pytest.skip("the tracker does not accept tables")
        table = _table()
        other = Table(torch.ones(1, 3))
        before = table.values.clone()
        for step in (1, 2):
            run.write(step, {"loss": 1.0})
            run.write_tables(step, {"router/load": table, "other": other})
        run.flush()
        state = plain_json(run.state(), "state()")
        self.crash(run)
        again = self.opened(tmp_path, resumed_step=1, state=state)
        again.write(2, {"loss": 1.0})
        again.write_tables(2, {"router/load": table})
        again.close("finished")
        assert torch.equal(before.nan_to_num(-1), table.values.nan_to_num(-1)), "write_tables() changes the table"
        logged = self.logged_tables(tmp_path)
        _bury(run)
        if logged is not None:
            found, expected = (
                {k: sorted(v) for k, v in logged.items()},
                {1: ["other", "router/load"], 2: ["router/load"]},
            )
            expected = expected if self.rewinds else {1: expected[1], 2: expected[1]}
            assert found == expected, f"resumed at step 1, tables are {found}, expected {expected}"
        contents = {"other": _content(other), "router/load": _content(table)}
        late = {"router/load": contents["router/load"]} if self.rewinds else contents
        self._assert_contents(tmp_path, "tables", {1: contents, 2: late})

    def test_series_with_tags_are_told_apart(self, tmp_path: Path) -> None:
        """Series with equal names and different tags stay separate; backends without tags join tags to the name."""
        run = self.opened(tmp_path)
        run.write(1, {"loss": 1.0, SeriesName("loss", {"stage": "train"}): 2.0})
        run.write(1, {SeriesName("loss", {"stage": "eval"}): 3.0})
        run.close("finished")
        expected = {1: {"loss": 1.0, "train/loss": 2.0, "eval/loss": 3.0}}
        assert (logged := self.read(tmp_path)) == expected, f"logged are {logged}, written were {expected}"

    @pytest.mark.parametrize("kind", ["write", *(f"write_{kind}" for kind in _KINDS)])
    def test_an_odd_name_costs_neither_the_tracker_nor_another_name(self, tmp_path: Path, kind: str) -> None:
        """Odd names, alone and with others, are stored under distinct names, for all accepted kinds of values."""
        make = (lambda: 2.0) if kind == "write" else _KINDS[kind.removeprefix("write_")][1]
        hub, notes = self.hub(self.fields(tmp_path))
        hub.open(self.run_info(tmp_path), {})
        getattr(hub, kind)(1, {name: make() for name in _ODD_NAMES})
        for name in _ODD_NAMES:
            getattr(hub, kind)(2, {name: make()})
        hub.write(3, {"loss": 1.0})
        hub.flush()
        plain_json(hub.state(), "state()")
        hub.close("finished")
        bad = [note for note in notes if not note.startswith("note: ")]
        assert not bad, f"with odd names in {kind}: {bad[0]}"
        logged = self.logged(tmp_path)
        if logged is not None:
            assert logged.get(3, {}).get("loss") == 1.0, f"after odd names in {kind}, logged are {logged.get(3)}"
            counts = {step: len(logged.get(step, {})) for step in (1, 2)} if kind == "write" else {}
            assert set(counts.values()) <= {len(_ODD_NAMES)}, f"of {len(_ODD_NAMES)} names, logged are {counts} by step"
        named = self.logged_kind(tmp_path, kind.removeprefix("write_")) if kind != "write" else None
        if named:
            counts = {step: len(set(named.get(step, ()))) for step in (1, 2)}
            assert set(counts.values()) == {len(_ODD_NAMES)}, (
                f"of {len(_ODD_NAMES)} names, {kind} keeps {counts} by step"
            )

    def test_the_defaults_write(self, tmp_path: Path) -> None:
        """A tracker with only the settings of ``default_fields`` stores values, with its real library."""
        hub, notes = self.hub(self.default_fields())
        hub.open(self.run_info(tmp_path), {})
        hub.write(1, {"loss": 1.0})
        hub.close("finished")
        assert not notes, f"with all defaults: {notes[0]}"
        logged = self.logged(tmp_path)
        assert logged in (None, {1: {"loss": 1.0}}), f"with all defaults, logged are {logged}"

    @pytest.mark.parametrize("kind", _KINDS)
    def test_other_kinds_are_taken_as_they_are(self, tmp_path: Path, kind: str) -> None:
        """Histograms, texts and pictures are stored, and not changed.

        Entries of later steps are removed or replaced on resume.
        """
        protocol, make = _KINDS[kind]
        run: Any = self.opened(tmp_path)
        takes_any = isinstance(run, protocol)
        if not takes_any:
            run.close("finished")
            pytest.skip(f"the tracker does not accept {kind}")
        given, expected = make(), make()
        name = SeriesName("other", {"stage": "train"})
        for step in (1, 2):
            run.write(step, {"loss": 1.0})
            getattr(run, f"write_{kind}")(step, {"one": given, name: make()})
        run.flush()
        state = plain_json(run.state(), "state()")
        self.crash(run)
        again: Any = self.opened(tmp_path, resumed_step=1, state=state)
        again.write(2, {"loss": 1.0})
        getattr(again, f"write_{kind}")(2, {"one": given, name: make()})
        again.close("finished")
        assert _bytes(given) == _bytes(expected), f"write_{kind}() changes its argument"
        logged = self.logged_kind(tmp_path, kind)
        _bury(run)
        if logged is not None:
            found = {step: sorted(names) for step, names in logged.items() if names}
            both = {1: ["one", "train/other"], 2: ["one", "train/other"]}
            assert found == both, f"resumed at step 1, {kind} are {found}, expected {both}"
        contents = {"one": _content(expected), "train/other": _content(expected)}
        self._assert_contents(tmp_path, kind, {1: contents, 2: contents})

    def test_a_name_of_several_kinds_costs_none_of_them(self, tmp_path: Path) -> None:
        """A number and a value of another kind may have the same name, and both are stored, also after a resume."""
        run: Any = self.opened(tmp_path)
        kinds = {kind: make for kind, (protocol, make) in _KINDS.items() if isinstance(run, protocol)}
        state = None
        for step in (1, 2):
            if step == 2:
                self.crash(run)
                buried, run = run, self.opened(tmp_path, resumed_step=1, state=state)
            run.write(step, {"loss": float(step)})
            for kind, make in kinds.items():
                getattr(run, f"write_{kind}")(step, {"loss": make()})
            run.flush()
            state = plain_json(run.state(), "state()")
        run.close("finished")
        logged = self.logged(tmp_path)
        _bury(buried)
        found = {step: values.get("loss") for step, values in (logged or {}).items()}
        assert logged is None or found == {1: 1.0, 2: 2.0}, (
            f"the numbers 'loss' are {found}, expected {{1: 1.0, 2: 2.0}}, if {', '.join(kinds)} of the same name are "
            "written; store one of them under another name, or raise"
        )
        for kind in kinds:
            named = self.logged_kind(tmp_path, kind)
            counts = {step: len(names) for step, names in (named or {}).items() if names}
            assert named is None or counts == {1: 1, 2: 1}, (
                f"with the number 'loss', {kind} of that name are {named}; store one under another name, or raise"
            )

    def test_files_are_copied(self, tmp_path: Path) -> None:
        """The backend stores files as they were at the time of the call, even if they change later."""
        run: Any = self.opened(tmp_path)
        takes_files = isinstance(run, TakesFiles)
        if not takes_files:
            run.close("finished")
            pytest.skip("the tracker does not accept files")
        (file := tmp_path / "notes.txt").write_text("first")
        run.write_files(1, {"notes": file})
        run.flush()
        assert file.is_file(), "write_files() moves the file; copy it"
        file.write_text("second")
        run.close("finished")
        logged = self.logged_file(tmp_path, "notes")
        assert logged in (None, b"first"), f"a file that was logged and changed afterwards reads {logged!r}; copy it"

    def _assert_contents(self, directory: Path, kind: str, expected: Mapping[int, Mapping[str, Any]]) -> None:
        logged = self.logged_contents(directory, kind)
        if logged is not None:
            found = {step: dict(contents) for step, contents in logged.items() if contents}
            assert found == expected, f"contents of {kind} are {found}, written were {expected}"

    # --- helpers for subclasses

    def hub(self, fields: Mapping[str, Any]) -> tuple[TrackerHub, list[str]]:
        """The engine's tracker hub with this tracker, and the list of lines that the hub prints."""
        notes: list[str] = []
        # A busy machine makes trackers slow; the hub's warning about that says nothing about this tracker.
        return TrackerHub({self.target: self.build(**fields)}, notes.append, patience=60.0), notes

    def opened(self, directory: Path, *, resumed_step: int = 0, state: Any = None) -> Any:
        """Open a run in a directory."""
        return self.build(**self.fields(directory)).open(self.run_info(directory, resumed_step), state)

    def run_info(self, directory: Path, resumed_step: int = 0) -> RunInfo:
        """Facts of a run of ten steps."""
        return RunInfo("suite", directory, "a run of the suite", {"steps": 10}, 10, resumed_step)

    def read(self, directory: Path) -> Logged:
        """Logged values; skips the test if they cannot be read back."""
        logged = self.logged(directory)
        if logged is None:
            pytest.skip(f"{type(self).__name__}.logged does not say how to read back what was logged")
        return logged


def _bury(run: Any) -> None:
    """Close a run whose process death was simulated, to release its files; call it only after all values were read."""
    with suppress(Exception):
        run.close("failed")


def _content(value: Any) -> Any:
    """Content of a value, as :meth:`TrackerSuite.logged_contents` describes it."""
    if isinstance(value, Table):
        names = value.rows or map(str, range(len(value.values)))
        rows = zip(names, value.values.tolist(), strict=True)
        return [[name, *(None if math.isnan(number) else number for number in row)] for name, row in rows]
    return value.counts.tolist() if isinstance(value, Histogram) else _bytes(value)


def _bytes(value: Any) -> Any:
    if isinstance(value, Histogram):
        return value.counts.tolist(), value.low, value.high
    return value if isinstance(value, str) else value.tolist()


def _table() -> Table:
    values = torch.tensor([[1.0, math.nan], [0.5, 2.0]])
    return Table(values, row="layer", column="expert", unit="load", neutral=1.0, rows=("0", "2"))

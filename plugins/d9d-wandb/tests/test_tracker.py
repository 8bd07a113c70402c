"""Values that the tracker writes offline are read back from wandb's files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import wandb
from d9d_core.errors import PluginError
from d9d_core.tracker import RunInfo
from d9d_testing.suites.tracker import Logged, TrackerSuite, by_step
from d9d_wandb import tracker as module
from d9d_wandb.config import WandbConfig
from d9d_wandb.segments import Segment, find_segments
from d9d_wandb.tracker import WandbTracker


def rows(directory: Path) -> list[dict[str, Any]]:
    """Rows of the newest run, over all its files."""
    newest = max((directory / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    run_id = newest.stem.removeprefix("run-")
    return [row for path in find_segments(directory, run_id) for row in Segment(path).rows()]


def points(directory: Path) -> Iterator[tuple[int, str, Any]]:
    for row in rows(directory):
        yield from ((row["step"], name, value) for name, value in row.items() if name != "step" and name[0] != "_")


def info(directory: Path, resumed_step: int = 0, **facts: Any) -> RunInfo:
    return RunInfo("mine", directory, "of a test", {"steps": 10}, 10, resumed_step, **facts)


def offline(**fields: Any) -> WandbTracker:
    return WandbTracker(WandbConfig(project="suite", mode="offline", **fields))


class TestWandb(TrackerSuite):
    pytestmark = pytest.mark.full  # each run starts a process, in a second

    target = "wandb"
    config: ClassVar = {"project": "suite", "mode": "offline"}
    patience: ClassVar = 10.0
    rewinds: ClassVar = False

    @pytest.fixture(autouse=True)
    def _a_service_of_its_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # A child process would share the service of this process, where a killed run stays in use.
        monkeypatch.delenv("WANDB_SERVICE", raising=False)

    def default_fields(self) -> Mapping[str, Any]:
        return {"project": "suite", "mode": "offline"}

    def crash(self, run: Any) -> None:
        run.flush()
        run._run.finish(exit_code=255)

    def logged(self, directory: Path) -> Logged:
        return by_step(points(directory))

    def logged_tables(self, directory: Path) -> Mapping[int, Sequence[str]]:
        return self.logged_kind(directory, "table-file")

    def logged_kind(self, directory: Path, kind: str) -> Mapping[int, Sequence[str]]:
        types = {"histograms": "histogram", "pictures": "image-file"}
        found: dict[int, list[str]] = {}
        for step, name, value in points(directory):
            if (value.get("_type") if isinstance(value, dict) else "texts") == types.get(kind, kind) and name != "loss":
                found.setdefault(step, []).append(name)
        return found

    def logged_contents(self, directory: Path, kind: str) -> Mapping[int, Mapping[str, Any]] | None:
        if kind != "texts":
            return None
        found: dict[int, dict[str, Any]] = {}
        for step, name, value in points(directory):
            if isinstance(value, str):
                found.setdefault(step, {})[name] = value
        return found


@pytest.mark.full
def test_rows_go_on_in_a_resumed_run_and_no_step_comes_twice(tmp_path: Path) -> None:
    run = offline().open(info(tmp_path, hparams={"lr": 0.1}, tags=("sweep",)), None)
    for step in (1, 2, 3):
        run.write(step, {"loss": float(step)})
    run.write(2, {"eval/loss": 7.0})  # later than the loss of step 3
    run.flush()
    run.flush()
    run._run.finish(exit_code=255)  # its process died
    again = offline().open(info(tmp_path, 1), run.state())
    for step in (2, 3, 4):
        again.write(step, {"loss": -1.0, "new": float(step)})
    again.close("finished")
    found = rows(tmp_path)
    assert [row["_step"] for row in found] == list(range(7))
    assert by_step(points(tmp_path)) == {
        1: {"loss": 1.0},
        2: {"loss": 2.0, "eval/loss": 7.0, "new": 2.0},
        3: {"loss": 3.0, "new": 3.0},
        4: {"loss": -1.0, "new": 4.0},
    }


@pytest.mark.full
def test_processes_that_begin_in_one_second_of_the_clock_log_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.time", lambda: 1.7e9)  # as a clock that is set back may have it
    state = None
    for step in (1, 2, 3):
        run = offline().open(info(tmp_path, step - 1), state)
        run.write(step, {"loss": float(step)})
        run.write(step + 1, {"loss": float(step + 1)})
        run.flush()
        state = run.state()
        run.close("failed")
    found = sorted((step, value) for step, name, value in points(tmp_path) if name == "loss")
    assert found == [(1, 1), (2, 2), (3, 3), (4, 4)]


@pytest.mark.full
def test_what_was_flushed_survives_a_kill(tmp_path: Path) -> None:
    code = f"""
import os, pathlib, sys
from d9d_core.tracker import RunInfo
from d9d_wandb.config import WandbConfig
from d9d_wandb.tracker import WandbTracker
info = RunInfo("r", pathlib.Path({str(tmp_path)!r}), "", {{}}, 9, 0)
run = WandbTracker(WandbConfig(project="p", mode="offline")).open(info, None)
for step in range(1, 5):
    run.write(step, {{"loss": float(step)}})
run.flush()
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, "WANDB_SILENT": "true"})
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4]


def test_a_run_whose_files_are_gone_is_said(tmp_path: Path) -> None:
    with pytest.raises(
        PluginError, match="files of the wandb run 'gone' of this job are no longer in .* set 'lost_run: new'"
    ):
        offline().open(info(tmp_path, 1), {"id": "gone"})


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PluginError, match="file/wandb cannot be written .* set dir of the tracker"):
        offline().open(info(tmp_path / "file"), None)


class Online:
    """Stand-in for a run on the server."""

    id, step, offline = "abc", 3, False

    def __init__(self, **arguments: Any) -> None:
        self.arguments, self.rows, self.exit_code = arguments, list[tuple[int, Any]](), -1
        self.settings = wandb.Settings()
        self.summary = {"step": 2, "loss": 1.0, "_runtime": 5}

    def define_metric(self, *_: Any, **__: Any) -> None:
        pass

    def log(self, values: Any, step: int, commit: bool) -> None:
        self.rows.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.mark.thorough
def test_a_run_on_the_server_is_resumed_and_ends_with_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.0)  # nothing is ever in its file
    made: list[Online] = []
    monkeypatch.setattr(module.wandb, "init", lambda **arguments: made.append(Online(**arguments)) or made[-1])
    tracker = WandbTracker(WandbConfig(project="p", entity="e", group="g", tags=["two"]))
    run = tracker.open(info(tmp_path, 1, hparams={"lr": 0.1}, tags=("one",)), {"id": "abc"})
    for step in (2, 3):
        run.write(step, {"loss": 5.0})
    assert run.flush() is False
    run.close("failed")
    (server,) = made
    asked = server.arguments
    expected = {"id": "abc", "resume": "must", "mode": "online", "project": "p", "entity": "e", "group": "g"}
    assert asked | expected == asked
    assert asked["notes"] == "of a test"
    assert (asked["tags"], asked["config"]) == (["one", "two"], {"lr": 0.1, "job": {"steps": 10}})
    assert server.rows == [(3, {"loss": 5.0, "step": 3})]  # the server has step 2 already
    assert server.exit_code == 1
    assert json.loads(json.dumps(run.state())) == {"id": "abc"}


@pytest.mark.thorough
def test_a_run_that_is_gone_from_the_server_is_said_or_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def init(**arguments: Any) -> Online:
        if arguments["resume"] == "must":
            raise wandb.errors.UsageError("You provided an invalid value for the `resume` argument. The value 'must'")
        return Online(**arguments)

    monkeypatch.setattr(module.wandb, "init", init)
    with pytest.raises(PluginError, match="wandb no longer has the run 'abc'.* set 'lost_run: new' of the tracker"):
        WandbTracker(WandbConfig(project="p")).open(info(tmp_path, 1), {"id": "abc"})
    WandbTracker(WandbConfig(project="p", lost_run="new")).open(info(tmp_path, 1), {"id": "abc"}).close("finished")
    assert "a new run replaces it" in capsys.readouterr().err

"""Calls of wandb by the tracker, over a stand-in of the library's run and files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from d9d_core.errors import PluginError
from d9d_core.metric import Table
from d9d_core.tracker import Histogram, RunInfo
from d9d_wandb import tracker as module
from d9d_wandb.config import WandbConfig
from d9d_wandb.tracker import WandbRun, WandbTracker, _bins, _kind, _last_steps, _table


class Run:
    """Stand-in of the library's run."""

    def __init__(self, step: int = 0, summary: Mapping[str, Any] | None = None, **given: Any) -> None:
        self.id, self.step, self.given = given.get("id", "i"), step, given
        self.summary = dict(summary or {})
        self.settings = SimpleNamespace(sync_file="file")
        self.logged: list[tuple[dict[str, Any], int]] = []
        self.defined: list[tuple[Any, ...]] = []
        self.ended: list[int] = []

    def define_metric(self, name: str, step_metric: str | None = None, step_sync: bool | None = None) -> None:
        self.defined.append((name, step_metric, step_sync))

    def log(self, values: dict[str, Any], step: int, commit: bool) -> None:
        assert commit
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[dict[str, Any]]]:
    """Rows in the files of runs, by the name of the file; a run writes to the file named ``file``."""
    rows: dict[str, list[dict[str, Any]]] = {}

    class Segment:
        def __init__(self, path: Path) -> None:
            self.name = Path(path).name

        def rows(self) -> list[dict[str, Any]]:
            return rows.get(self.name, [])

    monkeypatch.setattr(module, "Segment", Segment)
    monkeypatch.setattr(
        module, "find_segments", lambda _directory, _id: [Path(name) for name in rows if name not in ("file", "late")]
    )
    # Rows that the process of an earlier run writes are there once the files have settled.
    monkeypatch.setattr(module, "wait_until_settled", lambda _paths: rows.update(rows.pop("late", {})))  # type: ignore[call-overload]
    return rows


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """Opens the tracker with a stand-in of the library's run, or one that fails."""

    def run(config: WandbConfig, state: Any = None, resumed: int = 0, fails: str = "", **facts: Any) -> Any:
        def init(**given: Any) -> Run:
            if fails and given["resume"] != "never":
                raise wandb.errors.UsageError(fails)
            return Run(step=facts.get("step", 0), summary=facts.get("summary"), **given)

        monkeypatch.setattr(module.wandb, "init", init)
        known = {name: value for name, value in facts.items() if name in ("tags", "hparams")}
        about = facts.get("description", "of a test")
        info = RunInfo("mine", tmp_path, about, {"steps": 10}, 10, resumed, **known)
        return WandbTracker(config).open(info, state)

    return run


def test_a_new_run_has_the_facts_of_job_and_config(opened: Any, files: Any, tmp_path: Path) -> None:
    config = WandbConfig(project="p", entity="e", group="g", tags=["b"], mode="offline")
    given = opened(config, hparams={"lr": 0.1}, tags=("a",))._run.given
    assert (given["project"], given["entity"], given["group"], given["tags"]) == ("p", "e", "g", ["a", "b"])
    assert (given["name"], given["notes"], given["mode"], given["dir"]) == (
        "mine",
        "of a test",
        "offline",
        str(tmp_path),
    )
    assert given["config"] == {"lr": 0.1, "job": {"steps": 10}}
    assert (given["resume"], given["reinit"], given["force"], len(given["id"])) == ("never", "create_new", False, 8)
    assert (given["settings"].console, given["settings"].silent, given["allow_val_change"]) == ("off", True, True)
    assert (tmp_path / "wandb").is_dir()
    online = opened(WandbConfig(project="p", capture_terminal_logs=True, dir=tmp_path / "other"))._run
    assert opened(WandbConfig(project="p"), description="")._run.given["notes"] is None
    assert online.given["force"]
    assert online.given["settings"].console != "off"
    assert online.given["dir"] == str(tmp_path / "other")
    assert online.defined == [("step", None, None), ("*", "step", False)]


def test_a_resumed_run_goes_on_after_the_rows_in_its_files(opened: Any, files: Any) -> None:
    files["old-1"] = [{"_step": 3, "step": 5, "loss": 1.0, "text": "a"}, {"_step": 4, "step": 7, "lr": 0.1}]
    files["old-2"] = []
    files["late"] = {"old-2": [{"_step": 8, "step": 6, "loss": 1.0}]}
    run = opened(WandbConfig(project="p", mode="offline"), {"id": "old"}, 5, step=2)
    assert (run._run.given["id"], run._run.given["resume"], run.state()) == ("old", "allow", {"id": "old"})
    run.write(6, {"loss": 1.0, "lr": 2.0})
    run.write(7, {"loss": 3.0, "lr": 2.0, "text": 4.0})
    assert run._run.logged == [({"loss": 3.0, "text (number)": 4.0, "step": 7}, 9)]
    assert opened(WandbConfig(project="p"), {"id": "old"}, 5)._run.given["resume"] == "must"


def test_a_series_goes_on_after_step_0_or_an_unknown_one(opened: Any, files: Any) -> None:
    files["old-1"] = [{"_step": 0, "step": 0, "loss": 1.0}, {"_step": 1, "other": 1.0}]
    run = opened(WandbConfig(project="p"), {"id": "old"}, 1)
    run.write(0, {"loss": 2.0})
    run.write(1, {"loss": 2.0, "other": 3.0})
    assert run._run.logged == [({"loss": 2.0, "other": 3.0, "step": 1}, 2)]


def test_rows_of_a_new_run_are_numbered_from_0(opened: Any, files: Any) -> None:
    run = opened(WandbConfig(project="p"))
    for step in (0, 3):
        run.write(step, {"loss": 1.0})
    assert run._run.logged == [({"loss": 1.0, "step": 0}, 0), ({"loss": 1.0, "step": 3}, 1)]


def test_without_files_the_server_says_where_a_run_was(opened: Any, files: Any) -> None:
    summary = {"_step": 3, "step": 6, "loss": 1.0, "text": "a"}
    run = opened(WandbConfig(project="p"), {"id": "old"}, 5, step=4, summary=summary)
    run.write(6, {"loss": 2.0})
    run.write(7, {"loss": 2.0, "text": 1.0})
    assert run._run.logged == [({"loss": 2.0, "text (number)": 1.0, "step": 7}, 4)]


def test_files_are_artifacts_named_by_run_and_series(
    files: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Artifact:
        def __init__(self, name: str, type: str) -> None:  # noqa: A002 - the library's
            self.name, self.kind, self.added = name, type, list[str]()

        def add_file(self, path: str) -> None:
            self.added.append(path)

    monkeypatch.setattr(module.wandb, "Artifact", Artifact)
    run, made = written(files)
    logged: list[Artifact] = []
    made.log_artifact = logged.append  # type: ignore[attr-defined]
    run.write_files(3, {"job/a b_c.d-e": tmp_path / "job.yaml"})
    ((one),) = logged
    assert (one.name, one.kind, one.added) == ("i-job-a-b_c.d-e", "file", [str(tmp_path / "job.yaml")])
    run.close("finished")
    with pytest.raises(ValueError, match="the run is closed"):
        run.write_files(4, {})


def test_values_of_each_kind_are_in_the_library_s_classes(files: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.wandb, "Histogram", lambda np_histogram: [part.tolist() for part in np_histogram])
    monkeypatch.setattr(module.wandb, "Image", lambda picture: picture.tolist())
    monkeypatch.setattr(module.wandb, "Table", lambda columns, data: (columns, data))
    run, made = written(files)
    run.write_histograms(1, {"h": Histogram(torch.tensor([1.0, 3.0]), -1.0, 2.0)})
    run.write_pictures(2, {"p": torch.tensor([[[1, 2, 3]]], dtype=torch.uint8)})
    run.write_tables(3, {"t": Table(torch.tensor([[1.0, 2.0]]), row="layer", column="expert")})
    run.write(4, {"h": 1.0, "p": 1.0, "t": 1.0})
    assert made.logged == [
        ({"h": [[1.0, 3.0], [-1.0, 0.5, 2.0]], "step": 1}, 0),
        ({"p": [[[1, 2, 3]]], "step": 2}, 1),
        ({"t": (["layer", "expert 0", "expert 1"], [["0", 1.0, 2.0]]), "step": 3}, 2),
        ({"h (number)": 1.0, "p (number)": 1.0, "t (number)": 1.0, "step": 4}, 3),
    ]


def test_a_lost_run_is_an_error_or_replaced(opened: Any, files: Any, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {"state": {"id": "old"}, "resumed": 5}
    with pytest.raises(PluginError, match="the files of the wandb run 'old' of this job are no longer in"):
        opened(WandbConfig(project="p", mode="offline"), **gone)
    files["old-1"] = []
    with pytest.raises(PluginError, match="wandb no longer has the run 'old'.*set 'lost_run: new'"):
        opened(WandbConfig(project="p"), **gone, fails="cannot resume")
    with pytest.raises(PluginError, match="^the tracker 'wandb' cannot open a run: no such mode; change the fields"):
        opened(WandbConfig(project="p"), **gone, fails="no such mode.")
    run = opened(WandbConfig(project="p", lost_run="new"), **gone, fails="cannot resume")
    assert run._run.given["resume"] == "never"
    assert "a new run replaces it" in capsys.readouterr().err
    for state, resumed in ((None, 5), ({"id": "old"}, 0)):
        assert opened(WandbConfig(project="p"), state, resumed)._run.given["resume"] == "never"


def written(files: Any) -> tuple[WandbRun, Run]:
    made: Any = Run()
    return WandbRun(made, 0, {}, {}), made


def test_series_of_several_kinds_have_columns_of_their_own_and_no_reserved_names(files: Any) -> None:
    run, made = written(files)
    run.write(1, {"_step": 1.0, "a": 2.0})
    run.write_texts(1, {"a": "text", "b": "text"})
    run.write_texts(1, {"b": "again"})
    assert made.logged == [
        ({"%5Fstep": 1.0, "a": 2.0, "step": 1}, 0), ({"a (text)": "text", "b": "text", "step": 1}, 1),
    ]  # fmt: skip


def test_a_flush_waits_until_the_last_row_is_in_the_file_or_too_long(
    files: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, made = written(files)
    assert run.flush()
    run.write(1, {"a": 1.0})
    run.write(2, {"a": 1.0})
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        files["file"] = [{"_step": min(len(slept), 2) - 1}]

    monkeypatch.setattr(module.time, "sleep", sleep)
    assert run.flush()
    assert slept == [pytest.approx(0.04)] * 2
    run.write(3, {"a": 1.0})
    clock = iter([0.0, 1.0, 8.0, 8.1])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module.time, "sleep", slept.append)
    assert not run.flush()
    assert len(slept) == 4
    flushed: list[list[int]] = []
    with monkeypatch.context() as patch:
        patch.setattr(run, "flush", lambda: flushed.append(list(made.ended)))
        run.close("failed")
        run.close("finished")
    assert flushed == [[]]  # before the end
    assert made.ended == [1]
    for call in (lambda: run.write(4, {"a": 1.0}), run.flush):
        with pytest.raises(ValueError, match="the run is closed"):
            call()


def test_a_run_that_did_not_fail_ends_with_zero(files: Any) -> None:
    run, made = written(files)
    run.close("stopped")
    assert made.ended == [0]


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1.0, "number"), ("NaN", "number"), ("-Infinity", "number"), ("text", "text"), ({}, "number"),
        ({"_type": "histogram"}, "histogram"), ({"_type": "image-file"}, "picture"), ({"_type": "table-file"}, "table"),
    ],
)  # fmt: skip
def test_kinds_of_stored_values(value: object, kind: str) -> None:
    assert _kind(value) == kind


def test_the_last_steps_of_a_summary_are_those_of_the_run() -> None:
    assert _last_steps({"step": 7.0, "loss": 1.0, "_runtime": 2}) == {"step": 7, "loss": 7}
    assert _last_steps({"loss": 1.0}) == {}


def test_bins_and_tables_have_all_their_edges_and_labels() -> None:
    counts, edges = _bins(Histogram(torch.tensor([1.0, 3.0]), -1.0, 2.0))
    assert (counts.tolist(), edges.tolist()) == ([1.0, 3.0], [-1.0, 0.5, 2.0])
    values: Sequence[Sequence[float]] = [[1.0, 2.0], [3.0, 4.0]]
    for rows, names in (((), ["0", "1"]), (("a", "b"), ["a", "b"])):
        table = _table(Table(torch.tensor(values), row="layer", column="expert", unit="load", rows=rows))
        assert table.columns == ["layer", "expert 0", "expert 1"]
        assert table.data == [[name, *row] for name, row in zip(names, values, strict=True)]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            wandb.errors.UsageError("No API key configured. Use `wandb login` to log in."),
            "is not logged in to W&B: No API key configured. .*; run 'wandb login', or set WANDB_API_KEY to a",
        ),
        (
            wandb.errors.AuthenticationError("WANDB_API_KEY invalid: API key must have 40+ characters, has 3."),
            "is not logged in to W&B: WANDB_API_KEY invalid: .* has 3; run 'wandb login'",
        ),
        (
            wandb.errors.CommError("Timed out: connection refused\nConsider increasing the init_timeout setting"),
            "gets no run from W&B: Timed out: connection refused; check the network, WANDB_BASE_URL, and project",
        ),
        (wandb.errors.UsageError(""), "cannot open a run: UsageError; change the fields of the tracker 'wandb' or"),
    ],
)
def test_an_error_of_wandb_is_said_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
) -> None:
    def init(**_given: Any) -> None:
        raise error

    monkeypatch.setattr(module.wandb, "init", init)
    with pytest.raises(PluginError, match=f"^the tracker 'wandb' {text}"):
        WandbTracker(WandbConfig(project="p")).open(RunInfo("mine", tmp_path, "of a test", {}, 10, 0), None)


def test_the_library_raises_a_usage_error_without_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of wandb's own error, which the tracker recognises."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(PluginError, match="^the tracker 'wandb' is not logged in to W&B: .*; run 'wandb login'"):
        WandbTracker(WandbConfig(project="p")).open(RunInfo("mine", tmp_path, "of a test", {}, 10, 0), None)

"""Records of runs, read from their directories, and tables of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from d9d_core.errors import JobError
from d9d_reports.runs.differences import differing, flattened, shown
from d9d_reports.runs.record import RunRecord, find_runs, read_failures, unique_names
from d9d_reports.runs.sweep import Sweep
from d9d_reports.runs.tables import comparison_table, list_table, sweep_table


def write_run(directory: Path, lines: list[dict[str, Any]], saved: int = 0, **job: Any) -> Path:
    """Files of a run as training leaves them."""
    directory.mkdir(parents=True)
    (directory / "job.yaml").write_text(yaml.safe_dump({"steps": 10} | job))
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if saved:
        write_checkpoint(directory / "checkpoints", saved)
    return directory


def write_checkpoint(parent: Path, step: int) -> None:
    (parent / f"step-{step:08d}").mkdir(parents=True)
    (parent / f"step-{step:08d}" / "manifest.json").write_text("{}")


def test_the_steps_of_a_run_are_the_most_that_logs_and_checkpoints_know(tmp_path: Path) -> None:
    assert RunRecord.read(write_run(tmp_path / "a", [{"step": 3}], saved=2)).step == 3
    assert RunRecord.read(write_run(tmp_path / "b", [{"step": 3}], saved=5)).step == 5
    assert RunRecord.read(write_run(tmp_path / "c", [])).step == 0


def test_the_newest_whole_checkpoint_counts_as_saved(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [], saved=4)
    write_checkpoint(run / "checkpoints", 2)
    write_checkpoint(run / "checkpoints", 6)
    (run / "checkpoints" / "step-00000009").mkdir()  # unfinished
    (run / "checkpoints" / "step-x").mkdir()
    (run / "checkpoints" / "step-x" / "manifest.json").write_text("{}")
    record = RunRecord.read(run)
    assert (record.saved, record.status) == (6, "stopped")


def test_checkpoints_may_be_in_another_directory_or_remote(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "elsewhere", 7)
    other = write_run(tmp_path / "a", [], checkpoint={"dir": str(tmp_path / "elsewhere")})
    assert RunRecord.read(other).saved == 7
    remote = RunRecord.read(write_run(tmp_path / "b", [], saved=3, checkpoint={"dir": "s3://bucket/x"}))
    assert (remote.saved, remote.status) == (0, "started")


def test_the_status_follows_from_the_files_of_a_run(tmp_path: Path) -> None:
    damaged = write_run(tmp_path / "damaged", [])
    (damaged / "job.yaml").write_text("a: [")
    write_run(tmp_path / "started", [])
    write_run(tmp_path / "stopped", [], saved=1)
    write_run(tmp_path / "failed", [], saved=1)
    finished = write_run(tmp_path / "finished", [], saved=1)
    (finished / "finished.json").write_text(json.dumps({"step": 8, "steps": 8, "reason": None}))
    (tmp_path / "failures.json").write_text(json.dumps({"failed": "no memory", "finished": "earlier"}))
    records = find_runs([tmp_path])
    assert {record.name: record.status for record in records} == {
        name: name for name in ("damaged", "failed", "finished", "started", "stopped")
    }
    assert {record.name: record.total for record in records if record.job} == {
        "failed": 10, "finished": 8, "started": 10, "stopped": 10,
    }  # fmt: skip
    assert {record.name: record.error for record in records if record.error} == {
        "failed": "no memory", "finished": "earlier",
    }  # fmt: skip


@pytest.mark.parametrize("content", [None, "[1]", "{", '"text"'])
def test_a_missing_or_damaged_list_of_failures_is_empty(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "failures.json").write_text(content)
    assert read_failures(tmp_path) == {}


def test_a_run_in_epochs_has_no_total_before_its_end(tmp_path: Path) -> None:
    assert RunRecord.read(write_run(tmp_path / "a", [], steps=None, epochs=2)).total is None


def test_seconds_of_training_come_from_tokens_and_their_rate(tmp_path: Path) -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "tokens": 100, "tokens_per_second": 50.0},
        {"step": 2, "eval/loss": 3.0},
        {"step": 2, "tokens": 160, "tokens_per_second": 0.0},  # no rate: counted with the next line
        {"step": 3, "tokens": 200, "tokens_per_second": 20.0},
        {"step": 2, "tokens": 120, "tokens_per_second": 20.0},  # a second start, from an earlier checkpoint
        {"step": 3, "tokens": 140, "tokens_per_second": 40.0},
    ]
    assert RunRecord(tmp_path, {}, lines, 0).seconds == 2.0 + 5.0 + 0.0 + 0.5


def test_series_have_their_points_last_and_least_value(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0, "x": "text"}, {"step": 3, "loss": 1.5, "x": None}]
    record = RunRecord(tmp_path, {}, lines, 0)
    assert record.points("loss") == [(1, 2.0), (2, 1.0), (3, 1.5)]
    assert (record.last("loss"), record.best("loss")) == (1.5, 1.0)
    assert (record.points("x"), record.last("x"), record.best("x")) == ([], None, None)


def test_runs_are_found_once_in_their_directories_and_in_those_above(tmp_path: Path) -> None:
    first, second = write_run(tmp_path / "b", []), write_run(tmp_path / "a", [])
    assert [record.directory for record in find_runs([first, tmp_path])] == [first, second]
    (tmp_path / "empty").mkdir()
    with pytest.raises(JobError, match="contains no run"):
        find_runs([tmp_path / "empty"])
    with pytest.raises(JobError, match="is no directory"):
        find_runs([tmp_path / "missing"])


def test_runs_of_one_name_are_told_apart_by_their_parents_or_paths(tmp_path: Path) -> None:
    def names(*directories: str) -> list[str]:
        return unique_names([RunRecord(Path(directory), {}, [], 0) for directory in directories])

    assert names("/x/a", "/x/b") == ["a", "b"]
    assert names("/x/a", "/y/a") == ["x/a", "y/a"]
    assert names("/1/x/a", "/2/x/a") == ["/1/x/a", "/2/x/a"]


def test_jobs_differ_in_dotted_fields_and_neither_in_names_nor_in_equal_ones() -> None:
    first = {"run": {"name": "a", "dir": "x"}, "optimizer": {"lr": 0.1, "name": "adamw"}, "mesh": {}, "list": [1]}
    second = {"run": {"name": "b", "dir": "y"}, "optimizer": {"lr": 0.1, "name": "sgd"}, "list": [2]}
    assert differing([first, second]) == {"optimizer.name": ["adamw", "sgd"], "mesh": [{}, None], "list": [[1], [2]]}
    assert differing([first, second], leave_out=("list",)) == {
        "run.name": ["a", "b"], "run.dir": ["x", "y"], "optimizer.name": ["adamw", "sgd"], "mesh": [{}, None],
    }  # fmt: skip
    assert differing([first]) == {}
    assert flattened({"a": {"b": {"c": 1}}, "d": {}}, "x.") == {"x.a.b.c": 1, "x.d": {}}
    assert [shown(value) for value in ("text", 1.5, None, [1])] == ["text", "1.5", "null", "[1]"]


def rows(text: str) -> list[list[str]]:
    """Cells of a printed table."""
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines() if line.strip()]


def test_a_list_of_runs_shows_progress_and_the_fields_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = {"tokens": 7500, "tokens_per_second": 1.0}
    first = RunRecord(tmp_path / "a", {"steps": 9, "lr": 0.1}, [{"step": 3, "loss": 2.123456} | rates], 2)
    second = RunRecord(tmp_path / "b", {"lr": 0.2}, [{"step": 4, "loss": 1.0, "eval/loss": 3.0}], 0, "it is full")
    list_table([first, second])
    titles, one, two = rows(capsys.readouterr().out)
    assert titles == ["run", "status", "steps", "loss", "best", "eval", "started", "trained", "steps", "lr", "error"]
    assert one == ["a", "stopped", "3/9", "2.1235", "2.1235", "2:05:00", "9", "0.1"]
    assert two == ["b", "failed", "4", "1", "1", "3", "0.0 s", "null", "0.2", "it is full"]
    list_table([first])
    assert rows(capsys.readouterr().out)[0][-1] == "trained"


@pytest.mark.parametrize(("seconds", "text"), [(59.94, "59.9 s"), (60, "0:01:00"), (3725.4, "1:02:05")])
def test_times_of_runs_have_a_common_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], seconds: float, text: str
) -> None:
    list_table([RunRecord(tmp_path, {"a": 1}, [{"step": 1, "tokens": seconds, "tokens_per_second": 1.0}], 0)])
    assert rows(capsys.readouterr().out)[1][-1] == text


def test_a_comparison_has_a_column_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = RunRecord(tmp_path / "a", {"lr": 0.1}, [{"step": 3, "loss": 2.0, "lr": 0.1}, {"step": 4, "loss": 3.0}], 2)
    second = RunRecord(tmp_path / "b", {"lr": 0.2}, [{"step": 5, "loss": 1.0}], 0)
    comparison_table([first, second], ["loss", "lr"])
    assert rows(capsys.readouterr().out) == [
        ["a", "b"], ["lr", "0.1", "0.2"], ["status", "stopped", "started"], ["steps", "4", "5"], ["loss", "3", "1"],
        ["loss (least)", "2", "1"], ["lr", "0.1"],
    ]  # fmt: skip


def test_the_table_of_a_sweep_has_the_ending_of_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Named:
        def __init__(self, name: str) -> None:
            self.name = name

    runs = cast("Any", [Named("a"), Named("b")])
    sweep = Sweep(runs, [], [], 1, print, {"a": "failed", "b": "not started"}, {"a": "no memory"})
    sweep_table(sweep, {"a": RunRecord(tmp_path / "a", {"steps": 9}, [{"step": 3, "loss": 2.0}], 2)})
    assert rows(capsys.readouterr().out) == [
        ["run", "status", "steps", "loss", "best", "eval", "error"],
        ["a", "failed", "3/9", "2", "2", "no memory"],
        ["b", "not started"],
    ]

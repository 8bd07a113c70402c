"""``d9d runs``: tables and curves of runs that exist, read from their files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from d9d_core.events import TrainingFinished
from d9d_engine.job import Job

Run = Callable[..., tuple[int, str, str]]


def write_run(directory: Path, losses: list[float], saved: int = 0, ended: int | None = None, **job: Any) -> Path:
    """A run as training leaves it."""
    directory.mkdir(parents=True)
    values = {"run": {"name": directory.name}, "steps": 4, "export": False, "optimizer": {"name": "adamw", "lr": 0.1}}
    (directory / "job.yaml").write_text(yaml.safe_dump(values | job))
    lines = [
        {"step": step, "loss": loss, "tokens": 100.0 * step, "tokens_per_second": 50.0}
        for step, loss in enumerate(losses, 1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')
    if saved:
        checkpoint = directory / "checkpoints" / f"step-{saved:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        (checkpoint.parent / ".lock").write_text("0")
    if ended is not None:
        ending = {"step": ended, "steps": (values | job)["steps"] or ended, "reason": None}
        (directory / "finished.json").write_text(json.dumps(ending))
    return directory


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    directory = tmp_path / "runs"
    write_run(directory / "a", [4.0, 3.0, 2.0, 2.5], saved=4, ended=4)
    write_run(directory / "b", [4.0, 3.5], saved=2, optimizer={"name": "adamw", "lr": 0.2})
    write_run(directory / "c", [])
    (directory / "c" / "job.yaml").write_text("a: [")
    (directory / ".cache").mkdir()
    return directory


def test_a_list_has_status_losses_times_and_the_fields_that_differ(d9d: Run, runs: Path) -> None:
    status, out, _ = d9d("runs", "list", str(runs), "--json")
    assert status == 0
    first, second, damaged = json.loads(out)["runs"]
    shown = ("name", "status", "step", "steps", "loss", "best_loss", "seconds")
    assert [first[name] for name in shown] == ["a", "finished", 4, 4, 2.5, 2.0, 8.0]
    assert [second[name] for name in shown] == ["b", "stopped", 2, 4, 3.5, 3.5, 4.0]
    assert (damaged["status"], damaged["loss"]) == ("damaged", None)
    assert (first["changed"]["optimizer.lr"], second["changed"]["optimizer.lr"]) == (0.1, 0.2)
    assert "run.name" not in first["changed"]
    _, out, _ = d9d("runs", "list", str(runs))
    header, *rows = out.splitlines()
    assert header.split()[:6] == ["run", "status", "steps", "loss", "best", "eval"]
    assert "optimizer.lr" in header
    assert [row.split()[:3] for row in rows[:2]] == [["a", "finished", "4/4"], ["b", "stopped", "2/4"]]


def test_a_run_is_finished_only_if_it_says_so(d9d: Run, tmp_path: Path) -> None:
    """Whatever its checkpoints say: it may have failed in its export, or ended before its last step."""
    runs = tmp_path / "runs"
    write_run(runs / "a", [4.0, 3.0, 2.0, 2.5], saved=4)
    write_run(runs / "b", [4.0, 3.0], saved=2, ended=2, steps=4)
    write_run(runs / "c", [4.0, 3.0, 2.0], saved=3, ended=3, steps=None, epochs=1)
    (write_run(runs / "d", [4.0, 3.0], saved=2) / "finished.json").write_text('{"step": ')
    listed = json.loads(d9d("runs", "list", str(runs), "--json")[1])["runs"]
    assert [(run["status"], run["step"], run["steps"]) for run in listed] == [
        ("stopped", 4, 4), ("finished", 2, 4), ("finished", 3, 3), ("stopped", 2, 4),
    ]  # fmt: skip


def test_a_run_that_failed_in_a_sweep_is_listed_with_its_error(d9d: Run, runs: Path) -> None:
    (runs / "failures.json").write_text(json.dumps({"a": "an old one", "b": "the disk is full"}))
    listed = json.loads(d9d("runs", "list", str(runs), "--json")[1])["runs"]
    assert [(run["status"], run["error"]) for run in listed[:2]] == [("finished", None), ("failed", "the disk is full")]
    assert "the disk is full" in d9d("runs", "list", str(runs))[1].splitlines()[2]
    (runs / "failures.json").write_text("{")
    assert json.loads(d9d("runs", "list", str(runs / "b"), "--json")[1])["runs"][0]["status"] == "stopped"


def test_a_run_that_trains_is_running(runs: Path, d9d: Run) -> None:
    import fcntl

    with (runs / "b" / "checkpoints" / ".lock").open("w") as file:
        file.write(str(os.getpid()))
        file.flush()
        assert json.loads(d9d("runs", "list", str(runs / "b"), "--json")[1])["runs"][0]["status"] == "stopped"
        fcntl.flock(file, fcntl.LOCK_EX)
        assert json.loads(d9d("runs", "list", str(runs / "b"), "--json")[1])["runs"][0]["status"] == "running"


@pytest.mark.thorough
def test_a_comparison_overlays_curves_on_the_same_axes(d9d: Run, runs: Path, tmp_path: Path) -> None:
    given = ("runs", "compare", str(runs / "a"), str(runs / "b"))
    status, out, _ = d9d(*given)
    assert status == 0
    assert "optimizer.lr  0.1       0.2" in out.replace("  optimizer", "optimizer")
    curves = {line[0]: line[3:] for line in out.splitlines()[-2:]}
    assert "loss over steps, from 2 to 4" in out
    assert [len(curves[name]) for name in ("a", "b")] == [60, 31]  # a step has a quarter of the width
    assert (max(curves["a"]), min(curves["a"].strip())) == ("█", "▁")
    assert min(curves["b"].strip()) > "▅"
    svg, html = tmp_path / "curves.svg", tmp_path / "curves.html"
    for file in (svg, html):
        assert d9d(*given, "--picture", str(file))[0] == 0
    assert "<svg" in svg.read_text()
    assert html.read_text().startswith("<!doctype html>")
    assert html.read_text().count("<svg") == 1
    described = json.loads(d9d(*given, "--json")[1])
    assert described["runs"][1]["series"]["loss"] == [[1, 4.0], [2, 3.5]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["list", "{runs}/.cache"], ".cache contains no run; give the directory of a run (with job.yaml)"),
        (["list", "{runs}/none"], "none is no directory"),
        (["compare", "{runs}", "--series", "los"], "no run has logged 'los'; the runs have: loss, tokens"),
        (["compare", "{runs}", "--picture", "x.png"], "x.png must end in .svg or .html"),
    ],
)
def test_what_cannot_be_compared_is_told(d9d: Run, runs: Path, arguments: list[str], message: str) -> None:
    status, _, err = d9d("runs", *(word.format(runs=runs) for word in arguments))
    assert status == 2
    assert message in err


@pytest.mark.thorough
def test_real_runs_are_stopped_and_finished(d9d: Run, small_job: Callable[..., Path], tmp_path: Path) -> None:
    light = {"metrics": [], "lr_schedule": None, "trackers": [{"name": "jsonl", "picture": False}]}
    job = small_job(**light, steps=2, epochs=None)
    Job.load(job).build(lambda _: None).train()
    listed = json.loads(d9d("runs", "list", str(tmp_path / "runs"), "--json")[1])["runs"]
    assert [(run["name"], run["status"], run["step"]) for run in listed] == [("small", "finished", 2)]
    assert listed[0]["loss"] == listed[0]["best_loss"] != None  # noqa: E711 - of both
    # A run that is prolonged is not done until it says so again.

    class Fails:
        def subscriptions(self) -> list[tuple[type[Any], Callable[[Any], None]]]:
            return [(TrainingFinished, self.fail)]

        def fail(self, _event: object) -> None:
            raise ValueError("after the last step")

    with pytest.raises(ValueError, match="after the last step"):
        Job.load(job, overrides=["steps=3"]).build(lambda _: None, observers=[Fails()]).train()
    listed = json.loads(d9d("runs", "list", str(tmp_path / "runs"), "--json")[1])["runs"]
    assert (listed[0]["status"], listed[0]["error"]) == ("failed", "ValueError: after the last step")

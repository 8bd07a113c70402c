"""Commands ``runs``, ``report`` and ``sweep``: their options, and what they print."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from d9d_core.errors import JobError
from d9d_engine.sparklines import sparklines
from d9d_reports.commands import report, runs, sweep
from d9d_reports.report import page
from typer.testing import CliRunner


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Directory of two runs."""
    for name, rate, losses in (("a", 0.1, [4.0, 2.0, 2.5]), ("bb", 0.2, [3.0])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "job.yaml").write_text(yaml.safe_dump({"steps": 4, "lr": rate}))
        lines = [{"step": step, "loss": loss, "lr": rate} for step, loss in enumerate(losses, 1)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


@pytest.mark.thorough
def test_listed_runs_are_described_as_json(directory: Path) -> None:
    result = CliRunner().invoke(runs.app, ["list", str(directory), "--json"])
    first, second = json.loads(result.stdout)["runs"]
    shown = ("name", "status", "error", "step", "steps", "loss", "best_loss", "eval_loss", "best_eval_loss", "changed")
    assert [first[name] for name in shown] == ["a", "started", None, 3, 4, 2.5, 2.0, None, None, {"lr": 0.1}]
    assert (second["name"], second["changed"], second["directory"]) == ("bb", {"lr": 0.2}, str(directory / "bb"))
    (directory / "failures.json").write_text(json.dumps({"bb": "no memory"}))
    again = json.loads(CliRunner().invoke(runs.app, ["list", str(directory), "--json"]).stdout)["runs"]
    assert [one["error"] for one in again] == [None, "no memory"]


def test_compared_runs_have_curves_of_the_first_series(directory: Path) -> None:
    result = CliRunner().invoke(runs.app, ["compare", str(directory)])
    assert "loss over steps, from 2 to 4" in result.stdout
    lines = result.stdout.splitlines()
    curves = sparklines({"a": [(1, 4.0), (2, 2.0), (3, 2.5)], "bb": [(1, 3.0)]})
    assert lines[-2:] == [f"a   {curves['a']}", f"bb  {curves['bb']}"]
    result = CliRunner().invoke(runs.app, ["compare", str(directory), "--series", "lr", "--json"])
    assert [one["series"] for one in json.loads(result.stdout)["runs"]] == [
        {"lr": [[1, 0.1], [2, 0.1], [3, 0.1]]}, {"lr": [[1, 0.2]]},
    ]  # fmt: skip


def test_runs_without_a_loss_are_compared_without_curves(directory: Path) -> None:
    for file in directory.glob("*/metrics.jsonl"):
        file.write_text('{"step": 1, "score": 1.0}\n')
    result = CliRunner().invoke(runs.app, ["compare", str(directory)])
    assert (result.exit_code, "over steps" in result.stdout) == (0, False)
    assert "loss (least)" in result.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--series", "nothing"], "--series: no run has logged 'nothing'; the runs have: loss, lr"),
        (["--picture", "x.png"], "--picture: x.png must end in .svg or .html"),
    ],
)
def test_series_and_pictures_that_cannot_be_are_refused(directory: Path, words: list[str], said: str) -> None:
    result = CliRunner().invoke(runs.app, ["compare", str(directory), *words])
    assert isinstance(result.exception, JobError)
    assert str(result.exception) == said


def test_a_report_is_written_beside_the_first_run_unless_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[list[str], Path]] = []

    def write(found: dict[str, Any], path: Path) -> None:
        written.append((list(found), path))
        path.write_text("x" * 150_000)

    monkeypatch.setattr(page, "write_report", write)
    runner, first, second = CliRunner(), str(directory / "a"), str(directory / "bb")
    assert f"the run in {first}/report.html, 0.1 MB" in runner.invoke(report.app, [first]).output
    output = directory / "x.html"
    assert f"2 runs in {output}" in runner.invoke(report.app, [first, second, "--output", str(output)]).output
    assert written == [(["a"], directory / "a" / "report.html"), (["a", "bb"], output)]
    result = runner.invoke(report.app, [first, "--output", "x.pdf"])
    assert "--output: x.pdf must end in .html" in str(result.exception)


@pytest.fixture
def swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs ``d9d sweep`` with stand-ins for its parts."""

    def run(*words: str, interrupted: bool = False, errors: Any = None) -> tuple[list[Any], Any]:
        happened: list[Any] = []
        one = SimpleNamespace(directory=tmp_path / "sweep" / "a", overrides=("seed=1",), name="a")

        def combine(
            job: Path, grids: list[str], overrides: Any, _policy: Any, directory: Any, checked: Any
        ) -> list[Any]:
            happened.append((job.name, grids, overrides, directory))
            loaded = SimpleNamespace(check=lambda: happened.append("checked"))
            checked(lambda world_size, again: loaded)
            return [one]

        class Sweep:
            def __init__(self, found: Any, command: list[str], options: list[str], jobs: int, _say: Any) -> None:
                assert found == [one]
                happened.append((command[0], options, jobs))
                self.errors = errors or {}

            def run(self) -> bool:
                return interrupted

        monkeypatch.setattr(sweep, "output_is_incidental", lambda: happened.append("incidental"))
        monkeypatch.setattr(sweep, "for_processes", lambda _load, nproc: happened.append(("processes", nproc)))
        monkeypatch.setattr(sweep, "policy_of", lambda *given: happened.append(given))
        monkeypatch.setattr("d9d_reports.runs.grid.combine", combine)
        monkeypatch.setattr("d9d_reports.runs.sweep.Sweep", Sweep)
        monkeypatch.setattr(
            "d9d_reports.runs.tables.sweep_table", lambda _sweep, records: happened.append(list(records))
        )
        path = tmp_path / "job.yaml"
        path.write_text("")
        return happened, CliRunner().invoke(sweep.app, [str(path), "--grid", "seed=1", *words])

    return run


def test_a_sweep_runs_one_run_at_a_time_unless_told_otherwise(swept: Any, tmp_path: Path) -> None:
    happened, result = swept()
    assert happened == [
        "incidental", ([], False, False), ("job.yaml", ["seed=1"], [], None), "checked", ("train", [], 1), [],
    ]  # fmt: skip
    assert result.exit_code == 0
    (tmp_path / "p.py").write_text("")
    words = ["--jobs", "2", "--nproc", "3", "--no-plugins", "--strict-plugins", "--plugin", str(tmp_path / "p.py")]
    happened, _ = swept(*words, "--dir", "d")
    assert happened[2][3] == Path("d")
    assert happened[3] == ("processes", "3")
    options = ["--plugin", str(tmp_path / "p.py"), "--no-plugins", "--strict-plugins", "--nproc", "3"]
    assert happened[4] == ("train", options, 2)


def test_a_sweep_with_failures_or_an_interrupt_says_so(swept: Any) -> None:
    assert swept(errors={"a": "no memory"})[1].exit_code == 1
    assert swept(interrupted=True)[1].exit_code != 0


def test_an_array_job_is_written_to_a_new_file(swept: Any, tmp_path: Path) -> None:
    script = tmp_path / "array.sh"
    happened, result = swept("--slurm", str(script), "--jobs", "2")
    assert "--array=0-0%2" in script.read_text()
    assert (tmp_path / "sweep").is_dir()
    assert f"1 tasks in {script}; submit it with: sbatch {script}" in result.output
    assert ("train", [], 2) not in happened
    assert "exists; name another file" in str(swept("--slurm", str(script))[1].exception)

"""``d9d sweep``: grids that are checked first, runs that are processes, and their files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from d9d_engine.job import Job

Run = Callable[..., tuple[int, str, str]]
MakeJob = Callable[..., Path]
LIGHT = {"metrics": [], "lr_schedule": None, "trackers": [{"name": "jsonl", "picture": False}]}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("grids", "message"),
    [
        (["optimizer.lrr=1,2"], "--grid optimizer.lrr: "),
        (["optimizer.lr=1e-4,fast"], "--grid optimizer.lr: "),
        (["optimizer.lr=1e-4,0.0001"], "lr-1e-4 and lr-0.0001 are the same job"),
        (["seed=0,1", "seed=2"], "a field appears twice"),
        (["seed=0,"], "--grid seed=0,: write FIELD=VALUE,VALUE"),
        (["run.name=a,b"], "run.name cannot be in a grid: the sweep sets run"),
        (["lr_schedule.warmup_steps=1"], "--grid lr_schedule.warmup_steps: lr_schedule: expected the name"),
    ],
)
def test_a_grid_that_cannot_be_is_told_before_anything_starts(
    d9d: Run, small_job: MakeJob, tmp_path: Path, grids: list[str], message: str
) -> None:
    job = small_job(**LIGHT)
    status, _, err = d9d("sweep", str(job), *(word for grid in grids for word in ("--grid", grid)))
    assert status == 2
    assert message in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.thorough
def test_an_array_job_has_a_task_for_each_run(d9d: Run, small_job: MakeJob, tmp_path: Path) -> None:
    job, script = small_job(**LIGHT), tmp_path / "sweep.sh"
    grids = ("--grid", "optimizer.lr=1e-4,3e-4", "--grid", "data.sequence_length=16,32")
    given = ("sweep", str(job), *grids, "--set", "run.description=it's", "--slurm", str(script))
    status, _, err = d9d(*given, "--jobs", "2")
    assert (status, err) == (0, f"4 tasks in {script}; submit it with: sbatch {script}\n")
    assert "#SBATCH --array=0-3%2\n" in script.read_text()
    stand_in = tmp_path / "bin" / "d9d"
    stand_in.parent.mkdir()
    stand_in.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o755)
    names = []
    for task in range(4):
        environ = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": str(task)}
        out = subprocess.run(["bash", script], env=environ, check=True, capture_output=True, text=True).stdout
        command, file, *words = json.loads(out)
        assert (command, file, set(words[::2])) == ("train", str(job), {"--set"})
        names.append(Job.load(file, overrides=words[1::2]).run)
    expected = [f"lr-{lr}_sequence_length-{length}" for lr in ("1e-4", "3e-4") for length in (16, 32)]
    assert [run.name for run in names] == expected
    assert {(run.dir, run.description) for run in names} == {(tmp_path / "runs" / "small-sweep", "it's")}
    assert d9d(*given)[0] == 2  # the script exists


def values_of(out: str) -> dict[str, list[str]]:
    """Cells of each line of a table by the first one."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines()[1:] if line.strip()}


@pytest.mark.full
def test_runs_fail_apart_and_a_sweep_goes_on_where_it_was(d9d: Run, small_job: MakeJob, tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN)
    job = small_job(**LIGHT, steps=8, export=False, plugins=[str(broken)], subscribers=[{"name": "fails_with"}])
    given = ("sweep", str(job), "--grid", "seed=2,3", "--jobs", "2")
    status, out, _ = d9d(*given)
    assert status == 1
    rows = values_of(out)
    assert [rows[f"seed-{n}"][0] for n in (2, 3)] == ["failed", "finished"]
    assert out.count("ValueError: this seed is unlucky") == 1
    directory = tmp_path / "runs" / "small-sweep"
    log = (directory / "seed-2.log").read_text()
    listed = json.loads(d9d("runs", "list", str(directory), "--json")[1])["runs"]
    assert [(run["name"], run["error"]) for run in listed if run["status"] == "failed"] == [
        ("seed-2", "ValueError: this seed is unlucky")
    ]
    broken.write_text(BROKEN.replace("== 2", "== 9"))
    status, out, _ = d9d(*given)
    assert status == 0
    rows = values_of(out)
    assert [rows[f"seed-{n}"][:2] for n in (2, 3)] == [["finished", "8/8"], ["skipped", "8/8"]]
    assert (directory / "seed-2.log").read_text().startswith(log)
    alone = tmp_path / "alone"
    Job.load(job, overrides=["seed=3", f"run.dir={alone}"]).build(lambda _: None).train()
    found, expected = (
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (directory / "seed-3", alone / "small")
    )
    assert found == expected
    status, _, err = d9d(*given, "--set", "optimizer.lr=0.5")
    assert status == 2
    assert "belongs to another job: optimizer.lr is 0.01 there and 0.5 here" in err


@pytest.mark.full
def test_runs_that_end_by_their_epochs_or_early_are_not_trained_on(
    d9d: Run, small_job: MakeJob, tmp_path: Path
) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN.replace("StepEnds", "TrainingFinished"))
    stops = {"name": "early_stopping", "series": "eval/loss", "patience": 1, "min_delta": 100.0}
    data = {"name": "text", "sources": ["python:topics"], "sequence_length": 16}
    job = small_job(
        **LIGHT, steps=None, epochs=1, export=False, plugins=[str(broken)], subscribers=[stops, {"name": "fails_with"}],
        evaluation={"every": 1, "packs": 1, "data": data},
    )  # fmt: skip
    given = ("sweep", str(job), "--grid", "seed=2,3")
    status, out, err = d9d(*given, "--set", "checkpoint.every=1")
    assert status == 1, err
    rows = values_of(out)
    # The one fails after its last step, the other ends before the end of its epoch.
    assert [rows[f"seed-{n}"][0] for n in (2, 3)] == ["failed", "finished"]
    directory = tmp_path / "runs" / "small-sweep"
    assert not (directory / "seed-2" / "finished.json").exists()
    ending = json.loads((directory / "seed-3" / "finished.json").read_text())
    assert ending["step"] < ending["steps"]
    assert ending["reason"].startswith("early_stopping: ")
    broken.write_text(BROKEN.replace("== 2", "== 9"))
    status, out, _ = d9d(*given)
    assert status == 0
    assert [values_of(out)[f"seed-{n}"][0] for n in (2, 3)] == ["finished", "skipped"]


def test_runs_of_a_job_without_a_mesh_have_the_layout_of_train(d9d: Run, small_job: MakeJob, tmp_path: Path) -> None:
    job, script = small_job(**LIGHT), tmp_path / "sweep.sh"
    given = ("sweep", str(job), "--grid", "seed=0,1", "--slurm", str(script))
    status, _, err = d9d(*given, "--nproc", "2")
    assert (status, err) == (0, f"2 tasks in {script}; submit it with: sbatch {script}\n")
    assert "--nproc 2" in script.read_text()
    status, _, err = d9d(*given[:-1], str(tmp_path / "three.sh"), "--nproc", "3")
    assert status == 2
    assert "--grid seed=0" in err
    assert "batch" in err
    status, _, err = d9d(*given, "--nproc", "two")
    assert (status, "--nproc: 'two' is not a number of processes; give 1 or more, or auto" in err) == (2, True)


BROKEN = '''
from typing import Literal
from d9d_core.config import PluginConfig
from d9d_core.events import JobConfigured, StepEnds
from d9d_core.plugin import Ref, SubscriberSpec, hookimpl
D9D_API = 2

class Config(PluginConfig):
    """Fails with one seed."""

    name: Literal["fails_with"] = "fails_with"
    """Selects it."""

class Fails:
    def __init__(self, config): pass
    def subscriptions(self): return [(JobConfigured, self.look), (StepEnds, self.fail)]
    def look(self, event): self.seed = event.job.seed
    def fail(self, event):
        if self.seed == 2:
            raise ValueError("this seed is unlucky")

@hookimpl
def d9d_subscribers():
    config, build = Ref(f"{__name__}:Config"), Ref(f"{__name__}:Fails")
    yield SubscriberSpec(name="fails_with", summary="s", config=config, build=build)
'''


def started(job: Path, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "d9d_core", "sweep", str(job), "--grid", "seed=0,1,2", "--jobs", "2", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_until(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.05)


def trainings(directory: Path) -> list[int]:
    """Processes that train runs in a directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode().split("\0")
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if "train" in words and any(str(directory) in word for word in words) and state != "Z":
            found.append(int(process.name))
    return found


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left_when_a_sweep_is_ended(small_job: MakeJob, tmp_path: Path, number: signal.Signals) -> None:
    job = small_job(**LIGHT, steps=100_000, checkpoint={"every": None})
    directory = tmp_path / "runs" / "small-sweep"
    sweep = started(job)
    try:
        logs = [directory / f"seed-{seed}" / "metrics.jsonl" for seed in (0, 1)]
        wait_until(lambda: all(log.exists() and log.stat().st_size for log in logs))
        assert len(trainings(directory)) == 2
        sweep.send_signal(number)
        out, err = sweep.communicate(timeout=60)
        wait_until(lambda: not trainings(directory))
    finally:
        sweep.kill()
    saved = [seed for seed in (0, 1, 2) if list((directory / f"seed-{seed}").glob("checkpoints/step-*/manifest.json"))]
    assert saved == [0, 1]
    if number == signal.SIGINT:
        assert sweep.returncode == 130
        assert err.endswith("runs stopped in training are saved; start the sweep again to continue\n")
        assert [values_of(out)[f"seed-{n}"][0] for n in (0, 1)] == ["interrupted", "interrupted"]
        assert "not started" in out

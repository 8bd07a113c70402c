"""Grid of a sweep: its values, the names of its runs, finished runs, and the script of a Slurm array job."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from d9d_core.errors import JobError
from d9d_core.registry.policy import PluginPolicy
from d9d_engine.job import Job
from d9d_reports.runs.array_script import array_script
from d9d_reports.runs.grid import SweepRun, combine
from d9d_reports.runs.record import read_failures
from d9d_reports.runs.sweep import Sweep, _Active


class Stand:
    """Stand-in of a job: knows its values only."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values
        self.run = self
        self.registry = None
        self.dir, self.name = Path(values["run.dir"]), values["run.name"]

    @property
    def directory(self) -> Path:
        return self.dir / self.name

    def resolved(self) -> dict[str, Any]:
        nested: dict[str, Any] = {"run": {}, "plugins": {}, "steps": 10, "epochs": None}
        for name, value in self.values.items():
            section, _, field = name.rpartition(".")
            (nested.setdefault(section, {}) if section else nested)[field] = value
        return nested


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that take any field and need no plugins."""

    def load(path: Path, overrides: Sequence[str] = (), **_: object) -> Stand:
        values: dict[str, Any] = {"run.dir": str(path.parent / "runs"), "run.name": "base"}
        for override in overrides:
            name, _equals, value = override.partition("=")
            values[name] = yaml.safe_load(value)
        if "refused" in values:
            raise JobError(f"--set refused: no such field, value {values['refused']}\nsize is odd")
        return Stand(values)

    monkeypatch.setattr(Job, "load", load)


def combined(
    tmp_path: Path, *grids: str, overrides: Sequence[str] = (), directory: Path | None = None
) -> list[SweepRun]:
    def checked(load: Callable[[int | None, bool], Job]) -> Job:
        return load(None, False)

    return combine(tmp_path / "job.yaml", grids, overrides, PluginPolicy(), directory, checked)


@pytest.mark.usefixtures("stand_ins")
def test_a_grid_has_a_run_for_every_combination_named_by_its_values(tmp_path: Path) -> None:
    runs = combined(tmp_path, "optimizer.lr=1e-4, 3e-4", "seed=0,1", overrides=["steps=5"])
    assert [run.name for run in runs] == ["lr-1e-4_seed-0", "lr-1e-4_seed-1", "lr-3e-4_seed-0", "lr-3e-4_seed-1"]
    parent = tmp_path / "runs" / "base-sweep"
    assert runs[1].overrides == (
        "steps=5", "optimizer.lr=1e-4", "seed=1", f'run.dir="{parent}"', 'run.name="lr-1e-4_seed-1"',
    )  # fmt: skip
    assert runs[1].directory == parent / "lr-1e-4_seed-1"
    (run,) = combined(tmp_path, "seed=3", directory=tmp_path / "mine")
    assert run.directory == tmp_path / "mine" / "seed-3"


@pytest.mark.usefixtures("stand_ins")
def test_commas_inside_of_brackets_and_quotes_belong_to_a_value(tmp_path: Path) -> None:
    runs = combined(tmp_path, """field=[1,2],{a: (3,4)},"x,'y",'[,z',[[5],6],7""")
    assert [run.overrides[0] for run in runs] == [
        "field=[1,2]", "field={a: (3,4)}", """field="x,'y\"""", "field='[,z'", "field=[[5],6]", "field=7",
    ]  # fmt: skip


@pytest.mark.usefixtures("stand_ins")
def test_names_use_whole_fields_where_last_parts_are_equal_and_numbers_where_values_look_alike(tmp_path: Path) -> None:
    assert combined(tmp_path, "a.size=1", "b.size=2", "seed=0")[0].name == "a.size-1_b.size-2_seed-0"
    runs = combined(tmp_path, "x={a},[a],2")
    assert [run.name for run in runs] == ["x--a.0", "x--a.1", "x-2"]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("grids", "message"),
    [
        (["seed=0,"], "--grid seed=0,: write FIELD=VALUE,VALUE"),
        (["seed"], "--grid seed: write FIELD=VALUE,VALUE"),
        (["=1"], "--grid =1: write FIELD=VALUE,VALUE"),
        (["seed=0,1", "seed=2"], "a field appears twice"),
        (["run.name=a,b"], "run.name cannot be in a grid"),
        (["plugins.files[0]=a,b"], "cannot be in a grid"),
        (["lr=0.5,0.50"], "lr-0.5 and lr-0.50 are the same job"),
        (["a=" + ",".join(map(str, range(101))), "b=" + ",".join(map(str, range(100)))], "10,100 runs; a sweep has at"),
    ],
)
def test_a_grid_that_cannot_be_is_refused(tmp_path: Path, grids: list[str], message: str) -> None:
    with pytest.raises(JobError) as error:
        combined(tmp_path, *grids)
    assert message in str(error.value)


@pytest.mark.usefixtures("stand_ins")
def test_problems_name_the_grid_and_the_combination_and_are_told_once(tmp_path: Path) -> None:
    with pytest.raises(JobError) as error:
        combined(tmp_path, "refused=1,2", "seed=0,1")
    assert str(error.value).splitlines() == [
        "--grid refused: no such field, value 1",
        "--grid refused=1 seed=0: size is odd",
        "--grid refused=1 seed=1: size is odd",
        "--grid refused: no such field, value 2",
        "--grid refused=2 seed=0: size is odd",
        "--grid refused=2 seed=1: size is odd",
    ]


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(("values", "shown", "rest"), [(5, 10, []), (6, 10, ["and 2 more"])])
def test_at_most_ten_problems_are_listed(tmp_path: Path, values: int, shown: int, rest: list[str]) -> None:
    with pytest.raises(JobError) as error:
        combined(tmp_path, "refused=" + ",".join(map(str, range(values))))
    assert str(error.value).splitlines()[shown:] == rest


@pytest.mark.usefixtures("stand_ins")
def test_a_run_is_finished_if_its_job_is_the_same_and_as_long(tmp_path: Path) -> None:
    (run,) = combined(tmp_path, "optimizer.lr=0.1", overrides=["steps=5", "batch.microbatch=2", "mesh.dp=1"])
    assert not run.is_finished()
    run.directory.mkdir(parents=True)

    def written(ended: bool = True, **changes: Any) -> bool:
        job = {"steps": 5, "epochs": None, "optimizer": {"lr": 0.1}, "batch": {"microbatch": 2}, **changes}
        (run.directory / "job.yaml").write_text(yaml.safe_dump(job))
        (run.directory / "finished.json").unlink(missing_ok=True)
        if ended:
            (run.directory / "finished.json").write_text(json.dumps({"step": 5, "steps": 5, "reason": None}))
        return run.is_finished()

    assert written()
    assert written(mesh={"dp": 8}, batch={"microbatch": 4})
    assert not written(ended=False)
    assert not written(steps=7)
    assert not written(epochs=2)
    with pytest.raises(JobError, match="belongs to another job: optimizer.lr is 0.2 there and 0.1 here"):
        written(optimizer={"lr": 0.2})
    (run.directory / "job.yaml").write_text("a: [")
    assert not run.is_finished()


def test_an_array_job_has_one_case_for_each_run() -> None:
    runs = [
        SweepRun(name, overrides, cast("Job", None))
        for name, overrides in (("a", ("seed=0", "x=it's")), ("b", ("seed=1",)))
    ]
    text = array_script(runs, ["train", "my job.yaml"], ["--nproc", "2"], Path("/runs/sweep"), None)
    assert text == "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --array=0-1",
            "#SBATCH --job-name=sweep",
            "#SBATCH --output=/runs/sweep/slurm-%A_%a.log",
            "# Resources are options of sbatch: sbatch --gpus 1 --time 4:00:00 THIS_FILE",
            'case "$SLURM_ARRAY_TASK_ID" in',
            "  0) set -- --set seed=0 --set 'x=it'\"'\"'s' ;;  # a",
            "  1) set -- --set seed=1 ;;  # b",
            '  *) echo "no task $SLURM_ARRAY_TASK_ID in this array" >&2; exit 2 ;;',
            "esac",
            "exec d9d train 'my job.yaml' \"$@\" --nproc 2",
            "",
        ]
    )
    assert "#SBATCH --array=0-1%3\n" in array_script(runs, ["train"], [], Path("/x"), 3)


class Process:
    """Stand-in of a process that has ended."""

    def __init__(self, returncode: int) -> None:
        self.returncode, self.pid, self.waited = returncode, 2**22 + 1, False

    def wait(self) -> None:
        self.waited = True


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("text", "code", "interrupted", "ending", "error"),
    [
        ("step 1\nfinished in 3 s\nsaved\n", 0, False, "finished", None),
        ("finished in 3 s\nsaved\nexported\n", 0, False, "finished", None),
        ("finished earlier\na\nb\nc\n", 0, False, "interrupted", None),
        ("error: no disk\n", 2, False, "failed", "no disk"),
        ("error: no disk\n", 2, True, "interrupted", None),
        ("step 1\n", 0, True, "interrupted", None),
    ],
)
def test_the_end_of_a_run_is_told_and_a_failure_is_noted_in_the_directory_of_the_sweep(
    tmp_path: Path, text: str, code: int, interrupted: bool, ending: str, error: str | None
) -> None:
    (run,) = combined(tmp_path, "seed=1", directory=tmp_path)
    (tmp_path / "failures.json").write_text(json.dumps({"seed-1": "earlier", "other": "kept"}))
    log = tmp_path / "seed-1.log"
    log.write_text("error: of an earlier start\n" + text)
    said: list[str] = []
    sweep = Sweep([run], [], [], 1, said.append)
    process, output = Process(code), log.open("ab")
    active = _Active(run, cast("subprocess.Popen[bytes]", process), output, len("error: of an earlier start\n"), log)
    sweep._ended(active, interrupted)
    assert sweep.endings == {"seed-1": ending}
    assert sweep.errors == ({} if error is None else {"seed-1": error})
    assert read_failures(tmp_path) == {"other": "kept"} | sweep.errors
    assert said == [f"seed-1: {ending}" + (f": {error}" if error else "")]
    assert output.closed
    assert process.waited


@pytest.mark.usefixtures("stand_ins")
def test_the_first_stop_asks_a_run_to_save_and_the_second_kills_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run,) = combined(tmp_path, "seed=1", directory=tmp_path)
    sent: list[tuple[str, int]] = []
    monkeypatch.setattr("os.killpg", lambda _group, number: sent.append(("group", number)))
    process = Process(0)
    process.send_signal = lambda number: sent.append(("process", number))  # type: ignore[attr-defined]
    with (tmp_path / "log").open("ab") as output:
        active = _Active(run, cast("subprocess.Popen[bytes]", process), output, 0, tmp_path / "log")
        active.stop(at_once=False)
        active.stop(at_once=True)
    assert sent == [("process", signal.SIGTERM), ("group", signal.SIGKILL)]


@pytest.mark.usefixtures("stand_ins")
def test_finished_runs_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = combined(tmp_path, "seed=1,2", directory=tmp_path)
    monkeypatch.setattr(SweepRun, "is_finished", lambda _self: True)
    sweep = Sweep(runs, [], [], 1, print)
    assert not sweep.run()
    assert sweep.endings == {"seed-1": "skipped", "seed-2": "skipped"}

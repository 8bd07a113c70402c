"""Records of submissions in the run's directory, and the reports made of them."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from d9d_core.config import PluginConfig
from d9d_core.errors import DataError, JobError, LaunchError
from d9d_core.job_file.job import Run
from d9d_core.launcher import EngineStatus, LaunchState
from d9d_core.plugin import LauncherSpec, Ref, hookimpl
from d9d_core.registry.registry import Registry
from d9d_engine.run.directory import clear_ending, write_ending, write_failure, write_stop
from d9d_launch.engine import _problem, engine_config, read_options
from d9d_launch.record import FOLDER, RECORD, SubmissionRecord, digest_of, find_endings, find_submission, run_directory
from d9d_launch.report import RunReport


@pytest.fixture
def record(tmp_path: Path) -> SubmissionRecord:
    """Record of a submission of ``job.yaml``, written into the run's directory ``runs/a``."""
    job = tmp_path / "job.yaml"
    job.write_text("run: {name: a}\nsteps: 10\n")
    made = SubmissionRecord(
        engine="slurm",
        options={"partition": "ci"},
        identifier="12",
        nodes=2,
        processes=8,
        job=str(job),
        digest=digest_of(job),
        command=["sbatch", "slurm.sh"],
        time="2026-01-01T00:00:00+00:00",
    )
    (tmp_path / "runs" / "a" / FOLDER).mkdir(parents=True)
    made.write(tmp_path / "runs" / "a" / FOLDER)
    return made


def test_a_submission_is_found_by_the_job_file_and_by_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: SubmissionRecord
) -> None:
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "runs" / "a"
    for location, overrides in ((Path("job.yaml"), []), (directory, []), (Path("job.yaml"), ["run.name=a"])):
        assert find_submission(location, overrides, "slurm") == (directory, record)
    with pytest.raises(LaunchError, match="has no submission; d9d launch submit makes one"):
        find_submission(Path("job.yaml"), ["run.name=b"], None)
    with pytest.raises(LaunchError, match="--engine ray: .* was submitted to slurm; leave out --engine"):
        find_submission(Path("job.yaml"), [], "ray")
    with pytest.raises(JobError, match="the section 'run' is wrong"):
        run_directory(Path("job.yaml"), ["run.nam=b"])


def test_a_job_without_a_section_run_has_the_default_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("steps: 1\n", "run:\n"):
        (tmp_path / "job.yaml").write_text(text)
        assert run_directory(Path("job.yaml"), []) == Run().directory.absolute()


class BoxConfig(PluginConfig):
    """Options of an engine."""

    name: Literal["box"] = "box"
    minutes: int = 1
    secrets: tuple[int, ...] = ()


class Here(Ref):
    def load(self) -> Any:
        return BoxConfig


@hookimpl
def d9d_launchers() -> list[LauncherSpec]:
    return [LauncherSpec(name="box", summary="x", config=Here("my:config"), build=Here("my:build"))]


def test_each_wrong_option_of_an_engine_has_a_line() -> None:
    registry = Registry.of(SimpleNamespace(__name__="acme", d9d_launchers=d9d_launchers))
    assert engine_config(registry, "box", {"minutes": 5}) == BoxConfig(minutes=5)
    with pytest.raises(JobError) as caught:
        engine_config(registry, "box", {"minutes": "long", "secrets": ["hidden"], "minute": 3})
    minutes, secrets, unknown = str(caught.value).splitlines()
    assert minutes.startswith("--option minutes: input should be a valid integer")
    assert minutes.endswith(", got 'long'")
    assert secrets.startswith("--option secrets[0]: input should be a valid integer")
    assert "hidden" not in secrets
    assert unknown.startswith("--option minute: not a field of the engine 'box'")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"engine": 1}', '{"engine'])
def test_a_damaged_record_is_an_error(tmp_path: Path, record: SubmissionRecord, text: str) -> None:
    (tmp_path / "runs" / "a" / FOLDER / RECORD).write_text(text)
    with pytest.raises(LaunchError, match="cannot be read"):
        SubmissionRecord.read(tmp_path / "runs" / "a" / FOLDER)


def test_fields_of_wrong_types_are_an_error(tmp_path: Path, record: SubmissionRecord) -> None:
    file = tmp_path / "runs" / "a" / FOLDER / RECORD
    file.write_text(json.dumps({**json.loads(file.read_text()), "identifier": 12}))
    with pytest.raises(LaunchError, match="fields have wrong types"):
        SubmissionRecord.read(file.parent)


def test_a_changed_job_file_is_told(tmp_path: Path, record: SubmissionRecord) -> None:
    assert record.job_change() is None
    (tmp_path / "job.yaml").write_text("steps: 11\n")
    assert str(record.job_change()).endswith("job.yaml has changed since the submission")
    (tmp_path / "job.yaml").unlink()
    assert str(record.job_change()).endswith("job.yaml cannot be read any more")


@pytest.mark.parametrize(
    ("engine", "ending", "state", "line"),
    [
        (("failed", 2), "stop", "failed", "stopped by SIGTERM after step 5 of 10, and saved"),
        (("failed", 75), "stop", "stopped", "stopped by SIGTERM after step 5 of 10, and saved"),
        (("finished", None), "finished", "finished", "finished after step 10 of 10"),
        (("unknown", None), "finished", "unknown", "finished after step 10 of 10"),
        (("failed", None), "stop", "stopped", "stopped by SIGTERM after step 5 of 10, and saved"),
        (("failed", None), "failure", "failed", "failed: ValueError: no"),
        (("failed", None), "job", "failed", "failed: rank 1 on b: record 7; a restart would repeat this error"),
        (("running", None), "none", "running", "last logged step: 3, loss 2.5"),
    ],
)
def test_the_report_has_the_state_the_progress_and_the_cause(
    tmp_path: Path, record: SubmissionRecord, engine: tuple[LaunchState, int | None], ending: str, state: str, line: str
) -> None:
    directory = tmp_path / "runs" / "a"
    (directory / "metrics.jsonl").write_text('{"step": 2, "loss": 3.0}\n{"step": 3, "loss": 2.5}\n')
    if ending == "finished":
        write_ending(directory, 10, 10, None)
    elif ending == "stop":
        write_stop(directory, 5, 10, "SIGTERM")
    elif ending == "failure":
        write_failure(directory, 5, ValueError("no"))
    elif ending == "job":
        write_failure(directory, 5, DataError("record 7"), "rank 1 on b")
    status = EngineStatus(state=engine[0], detail="WORD on n1", log=("one", "two"), exit_status=engine[1])
    report = RunReport(directory, record, status)
    lines = list(report.lines())
    assert report.state == state
    assert lines[0] == f"slurm 12: {state} (WORD on n1); 2 x 8 processes"
    assert line in lines
    assert lines[-3:] == ["last lines of the log:", "  one", "  two"]
    changed = RunReport(directory, replace(record, digest="0"), status)
    assert any("has changed since the submission" in text for text in changed.lines())


def test_options_come_from_a_file_and_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "engine.yaml"
    file.write_text("partition: a\nrestarts: 3\n")
    assert read_options(file, ["partition=b", "setup=[module load x]"]) == {
        "partition": "b",
        "restarts": 3,
        "setup": ["module load x"],
    }
    for wrong in ("partition", "=a", "a.b=1"):
        with pytest.raises(JobError, match="write FIELD=VALUE"):
            read_options(None, [wrong])


def test_a_missing_file_of_options_is_not_called_a_job_file(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"--options .*options.yaml: no such file; name a YAML"):
        read_options(tmp_path / "options.yaml", [])


def test_a_secret_that_was_written_instead_of_its_name_is_not_repeated() -> None:
    location = ("secrets", "HF_TOKEN")
    assert _problem(location, "Value error, write SECRET/KEY", "hf_1") == "--option secrets.HF_TOKEN: write SECRET/KEY"
    assert _problem(("minutes",), "Too small", -1) == "--option minutes: too small, got '-1'"


@pytest.mark.parametrize(
    ("ending", "engine", "state", "line"),
    [
        ("stop", "waiting", "waiting", "stopped by SIGTERM after step 5 of 10, and saved"),
        ("stop", "failed", "failed", "stopped by SIGTERM after step 5 of 10, and saved"),
        ("failure", "running", "running", "failed: ValueError: no"),
        ("finished", "waiting", "waiting", "finished after step 10 of 10"),
    ],
)
def test_the_ending_of_an_earlier_submission_is_not_of_this_one(
    tmp_path: Path, record: SubmissionRecord, ending: str, engine: LaunchState, state: str, line: str
) -> None:
    directory = tmp_path / "runs" / "a"
    write = {
        "stop": lambda: write_stop(directory, 5, 10, "SIGTERM"),
        "failure": lambda: write_failure(directory, 5, ValueError("no")),
        "finished": lambda: write_ending(directory, 10, 10, None),
    }[ending]
    write()
    replace(record, earlier=find_endings(directory)).write(directory / FOLDER)
    again = SubmissionRecord.read(directory / FOLDER)
    assert again is not None
    assert again.earlier
    report = RunReport(directory, again, EngineStatus(state=engine, detail=""))
    assert report.state == state
    assert line not in list(report.lines())
    clear_ending(directory)  # as the start of the new submission does
    write()
    for name in again.earlier:
        os.utime(directory / name, ns=(0, again.earlier[name] + 1))  # clocks of some file systems tick slowly
    assert line in list(report.lines())


def test_a_submission_of_a_finished_run_is_finished(tmp_path: Path, record: SubmissionRecord) -> None:
    directory = tmp_path / "runs" / "a"
    write_ending(directory, 10, 10, None)
    again = replace(record, earlier=find_endings(directory))
    report = RunReport(directory, again, EngineStatus(state="finished", detail="", exit_status=0))
    assert "finished after step 10 of 10" in list(report.lines())

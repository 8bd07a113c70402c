"""The batch script and the command of sbatch, read by bash; no Slurm is needed."""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import LaunchError
from d9d_core.launcher import LaunchRequest
from d9d_slurm.config import SlurmConfig
from d9d_slurm.launcher import SlurmLauncher
from d9d_slurm.script import batch_script
from pydantic import ValidationError

HOSTILE = 'it\'s "a" $(touch pwned) `touch pwned` %j ; touch pwned #x'


def request_in(folder: Path, **fields: Any) -> LaunchRequest:
    folder = folder / "runs" / "run" / "launch"
    request = LaunchRequest(
        name="run",
        command=("/venv/bin/python", "-m", "d9d_core", "train", str(folder / "job.yaml")),
        job="steps: 1\n",
        job_file=folder / "job.yaml",
        folder=folder,
        working_directory=folder.parents[2],
        nodes=2,
        processes=8,
    )
    return replace(request, **fields)


def options_of(script: str) -> set[str]:
    return {line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH ")}


def test_the_script_asks_for_the_configured_resources_and_for_time_to_save(tmp_path: Path) -> None:
    config = SlurmConfig(
        partition="a,b",
        constraint="[a100|h100]",
        account="lab",
        qos="high",
        reservation="r1",
        minutes=90,
        cpus_per_task=12,
        memory_gib=0,
        exclusive=True,
        grace=300,
        setup=["module load cuda"],
    )
    script = batch_script(config, request_in(tmp_path))
    assert options_of(script) == {
        "nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=12", "partition=a,b", "account=lab",
        "qos=high", "reservation=r1", "time=90", 'constraint="[a100|h100]"', "mem=0", "exclusive", "signal=TERM@300",
        "requeue", "open-mode=append",
    }  # fmt: skip
    assert "\nmodule load cuda\n" in script
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=$SLURM_CPUS_PER_TASK /venv/bin/python -m d9d_core" in script


@pytest.mark.parametrize(
    ("fields", "device", "expected"),
    [({}, "auto", "gpus-per-node=8"), ({}, "cpu", None), ({"gpus_per_node": 4}, "cuda", "gpus-per-node=4"),
     ({"gpus_per_node": 0}, "auto", None)],
)  # fmt: skip
def test_gpus_follow_from_processes_and_device(
    tmp_path: Path, fields: dict[str, Any], device: str, expected: str | None
) -> None:
    script = batch_script(SlurmConfig(**fields), request_in(tmp_path, device=device))
    assert {option for option in options_of(script) if option.startswith("gpus")} == ({expected} - {None})


@pytest.mark.parametrize(
    ("status", "restarts_so_far", "requeued", "rank", "final"),
    [
        (0, 0, False, 0, 0),
        (2, 0, False, 2, 2),
        (75, 0, True, 75, 75),
        (1, 0, True, 1, 1),
        (137, 2, True, 1, 137),
        (137, 3, False, 1, 137),
        (137, 0, False, 2, 2),  # a rank with an error of the job, after which srun killed the others
    ],
)
def test_the_script_requeues_after_every_status_but_finished_and_an_error_of_the_job(
    tmp_path: Path, status: int, restarts_so_far: int, requeued: bool, rank: int, final: int
) -> None:
    folder = tmp_path / HOSTILE
    request = request_in(folder)
    request.folder.mkdir(parents=True)
    request.job_file.write_text(request.job)
    log = request.folder / "slurm-7.log"
    log.write_text("srun: error: n1: task 0: Exited with exit code 2\n")  # of an earlier start
    script = batch_script(SlurmConfig(restarts=3), request)
    done, calls = run_script(
        script, tmp_path, status, restarts_so_far, log, f"srun: error: n1: tasks 0-3: Exited with exit code {rank}"
    )
    assert done.returncode == final, done.stderr
    assert calls[0] == "\x1f".join(["srun", "--kill-on-bad-exit=1", *request.command])
    assert calls[1:] == (["\x1f".join(["scontrol", "requeue", "7"])] if requeued else [])
    assert not list(tmp_path.rglob("pwned"))


def test_a_machine_without_the_run_is_told_instead_of_a_training(tmp_path: Path) -> None:
    done, calls = run_script(batch_script(SlurmConfig(), request_in(tmp_path / HOSTILE)), tmp_path, 0, 0)
    assert (done.returncode, calls) == (2, [])
    assert "does not have" in done.stderr
    assert "run.dir must be a directory that all machines share" in done.stderr
    assert not list(tmp_path.rglob("pwned"))


def run_script(
    script: str, folder: Path, status: int, restarts: int, log: Path | None = None, printed: str = ""
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script with an srun and an scontrol that write down their arguments."""
    bin_folder = folder / "bin"
    bin_folder.mkdir()
    for name in ("srun", "scontrol"):
        tool = bin_folder / name
        told = "" if log is None else 'echo "$PRINTED" >> "$LOG"; '
        last = f"{told}exit {status}" if name == "srun" else ""
        line = '(IFS=$\'\\x1f\'; echo "${0##*/}"$\'\\x1f\'"$*") >> "$CALLS"'
        tool.write_text(f"#!/bin/bash\n{line}\n{last}\n")
        tool.chmod(0o755)
    env = {
        "PATH": f"{bin_folder}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "LOG": str(log),
        "PRINTED": printed,
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": str(restarts),
    }
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, check=False)
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


def test_texts_of_users_are_arguments_of_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "hidden-value")
    folder = tmp_path / HOSTILE
    request = request_in(folder, name="a-run.1")
    submission = SlurmLauncher(SlurmConfig(export=["SECRET", "HF_HOME"])).prepare(request)
    assert submission == SlurmLauncher(SlurmConfig(export=["SECRET", "HF_HOME"])).prepare(request)
    script = request.folder / "slurm.sh"
    assert submission.command == (
        "sbatch",
        "--parsable",
        "--export=SECRET,HF_HOME",
        "--job-name=a-run.1",
        f"--chdir={folder}",
        f"--output={str(request.folder).replace('%', '%%')}/slurm-%j.log",
        str(script),
    )
    assert submission.files.keys() == {script}
    assert "hidden-value" not in f"{submission}"
    assert SlurmLauncher(SlurmConfig()).prepare(request).command[2] == "--export=NONE"


def test_paths_that_slurm_cannot_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="has a backslash, which Slurm does not keep"):
        SlurmLauncher(SlurmConfig()).prepare(request_in(tmp_path / "a\\b"))
    with pytest.raises(LaunchError, match="has a control character, such as a line break"):
        request_in(tmp_path / "a\n#SBATCH --partition=x")


@pytest.mark.parametrize(
    "fields",
    [{"partition": "a\n#SBATCH --uid=0"}, {"partition": "a --uid=0"}, {"account": "$(id)"}, {"constraint": 'a" --x'},
     {"setup": ["a\nb"]}, {"setup": ["a\rb"]}, {"setup": ["a\0b"]}, {"export": ["A=B"]}, {"export": ["A,ALL"]},
     {"minutes": "1:00"}, {"grace": 0}, {"grace": 70_000}, {"minutes": 2, "grace": 120}],
)  # fmt: skip
def test_options_that_would_add_lines_or_options_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        SlurmConfig(**fields)


@pytest.mark.parametrize("identifier", ["1; rm -rf /", "--all", "", "12\n13", "12.batch"])
def test_an_identifier_from_a_changed_record_reaches_no_command(tmp_path: Path, identifier: str) -> None:
    launcher = SlurmLauncher(SlurmConfig())
    for call in (lambda: launcher.status(identifier, tmp_path, 1), lambda: launcher.cancel(identifier)):
        with pytest.raises(LaunchError, match="is not a number of a Slurm job"):
            call()


def test_without_slurm_the_error_says_where_to_run_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="sbatch, squeue, scontrol, scancel not found.*run this command on a login"):
        SlurmLauncher(SlurmConfig()).require()


def test_the_options_of_the_readme_are_valid() -> None:
    import re

    import yaml

    readme = (Path(__file__).parents[1] / "README.md").read_text()
    (block,) = re.findall(r"^```yml[^\n]*\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE)
    assert SlurmConfig(**yaml.safe_load(block)).partition == "gpu"


def test_slurms_lines_become_one_with_the_next_action(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("sbatch", "squeue", "scontrol", "scancel"):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/sh\necho '{name}: error: no' >&2\necho '{name}: fatal: nothing' >&2\nexit 1\n")
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LaunchError, match="asked: scontrol: error: no; fatal: nothing; run this command on a login"):
        SlurmLauncher(SlurmConfig()).require()


@pytest.mark.parametrize(
    ("restarts", "text", "said"), [(1, "steps: 2\n", True), (1, "steps: 1\n", False), (0, "steps: 2\n", False)]
)
def test_a_restart_says_that_the_job_file_has_changed(tmp_path: Path, restarts: int, text: str, said: bool) -> None:
    folder = tmp_path / HOSTILE
    digest = hashlib.sha256(b"steps: 1\n").hexdigest()
    request = request_in(folder, source=folder / "job.yaml", source_sha256=digest)
    request.folder.mkdir(parents=True)
    request.job_file.write_text(request.job)
    (folder / "job.yaml").write_text(text)
    (request.folder / "slurm-7.log").touch()
    done, calls = run_script(batch_script(SlurmConfig(), request), tmp_path, 0, restarts)
    note = f"note: {folder}/job.yaml has changed since the submission; this restart trains the submitted job, "
    assert (note in done.stdout) == said, done.stderr
    assert done.stderr == ""
    assert len(calls) == 1
    assert not list(tmp_path.rglob("pwned"))

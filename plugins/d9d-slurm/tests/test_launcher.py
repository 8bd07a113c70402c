"""The launcher ``slurm``: calls of Slurm's commands, and its reading of their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from d9d_core.errors import LaunchError
from d9d_core.launcher import Submission
from d9d_slurm.config import SlurmConfig
from d9d_slurm.launcher import SlurmLauncher
from d9d_testing.stand_ins import StandIns

LAUNCHER = SlurmLauncher(SlurmConfig())


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIns:
    made = StandIns(tmp_path / "bin", ["sbatch", "squeue", "scontrol", "scancel"])
    made.first_in_path(monkeypatch)
    return made


def queue(state: str, restarts: str = "0", nodes: str = "", reason: str = "None", status: str = "0") -> str:
    """Line of squeue, whose columns have fixed widths."""
    return f"{state:30}{restarts:12}{nodes:200}{reason:100}{status:12}"


@pytest.mark.parametrize(
    ("columns", "state", "detail", "status"),
    [
        ({"state": "PENDING", "reason": "Priority"}, "waiting", "PENDING, Priority", None),
        ({"state": "RUNNING", "nodes": "n[1-2]"}, "running", "RUNNING on n[1-2]", None),
        ({"state": "RUNNING", "restarts": "2", "nodes": "n1"}, "running", "RUNNING on n1, restarts: 2", None),
        ({"state": "COMPLETED"}, "finished", "COMPLETED", 0),
        ({"state": "FAILED", "status": "19200"}, "failed", "FAILED", 75),
        ({"state": "FAILED", "reason": "NonZeroExitCode", "status": "512"}, "failed", "FAILED, NonZeroExitCode", 2),
        ({"state": "NODE_FAIL", "status": "9"}, "failed", "NODE_FAIL", -9),
        ({"state": "CANCELLED", "status": "15"}, "cancelled", "CANCELLED", None),
        ({"state": "TIMEOUT", "status": "N/A"}, "failed", "TIMEOUT", None),
    ],
)
def test_the_state_of_a_job_is_told(
    slurm: StandIns, tmp_path: Path, columns: dict[str, str], state: str, detail: str, status: int | None
) -> None:
    slurm.answer("squeue", text=queue(**columns))
    found = LAUNCHER.status("12", tmp_path, 5)
    assert (found.state, found.detail, found.exit_status, found.log) == (state, detail, status, ())
    ((*options, columns_of),) = slurm.calls("squeue")
    assert options[-3:] == ["--noheader", "--jobs=12", "--states=all"]
    assert columns_of == "--Format=State:30,RestartCnt:12,NodeList:200,Reason:100,exit_code:12"


def test_the_last_lines_of_the_log_are_told(slurm: StandIns, tmp_path: Path) -> None:
    slurm.answer("squeue", text=queue("RUNNING"))
    text = "".join(f"{'line':<99}\n" for _ in range(1000)) + "två\nthree\n"
    (tmp_path / "slurm-12.log").write_bytes(text.encode() + b"\xff\n")
    assert LAUNCHER.status("12", tmp_path, 3).log == ("två", "three", "\ufffd")
    assert LAUNCHER.status("12", tmp_path, 0).log == ()
    assert len(LAUNCHER.status("12", tmp_path, 5000).log) == 659  # of the last 64 KiB
    assert LAUNCHER.status("13", tmp_path, 3).log == ()


def test_a_job_that_slurm_has_forgotten_is_unknown(slurm: StandIns, tmp_path: Path) -> None:
    for text, status in (("slurm_load_jobs error: Invalid job id specified", 1), ("\n", 0)):
        slurm.answer("squeue", text=text, status=status)
        found = LAUNCHER.status("12", tmp_path, 1)
        assert (found.state, found.detail) == ("unknown", "Slurm no longer knows the job")
        with pytest.raises(LaunchError, match="job 12 has ended already, so that there is nothing to cancel"):
            LAUNCHER.cancel("12")
    slurm.answer("squeue", text="slurm_load_jobs error: Unable to contact slurm controller", status=1)
    with pytest.raises(LaunchError, match="squeue: slurm_load_jobs error: Unable to contact"):
        LAUNCHER.status("12", tmp_path, 1)


@pytest.mark.parametrize(
    ("state", "steps", "options", "said"),
    [
        ("RUNNING", "12.batch\n12.0\n", ["--signal=TERM", "12"], "all ranks finish their step, save and stop"),
        ("RUNNING", "12.batch\n12.extern\n112.0\n", ["12"], "cancelled; it did not train"),
        ("PENDING", "", ["12"], "cancelled; it did not train"),
    ],
)
def test_a_job_is_not_requeued_and_saves_if_it_trains(
    slurm: StandIns, state: str, steps: str, options: list[str], said: str
) -> None:
    slurm.answer("squeue", text=queue(state))
    slurm.answer("squeue", "--noheader", "--steps", text=steps)
    assert said in LAUNCHER.cancel("12")
    calls: list[Any] = [call for call in slurm.calls() if call[0] != "squeue"]
    assert calls == [["scontrol", "update", "JobId=12", "Requeue=0"], ["scancel", *options]]
    assert slurm.calls("squeue")[-1][-3:] == ["--steps", "--jobs=12", "--format=%i"]


@pytest.mark.parametrize("state", ["COMPLETED", "CANCELLED", "FAILED"])
def test_a_job_that_has_ended_is_not_cancelled(slurm: StandIns, state: str) -> None:
    slurm.answer("squeue", text=queue(state))
    with pytest.raises(LaunchError, match="has ended already"):
        LAUNCHER.cancel("12")
    assert not slurm.calls("scancel")


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo noise; echo the cause >&2", "the cause"),
        ("echo the cause", "the cause"),
        ("echo >&2", "exit status 3"),
    ],
)
def test_a_command_that_fails_is_told_by_its_errors_or_else_by_its_output_or_its_status(
    slurm: StandIns, script: str, said: str
) -> None:
    (slurm.folder / "squeue").write_text(f"#!/bin/sh\n{script}\nexit 3\n")
    with pytest.raises(LaunchError, match=rf"^squeue: {said}$"):
        LAUNCHER.cancel("12")


@pytest.mark.parametrize(("text", "number"), [("4711", "4711"), ("a note\n4711;cluster\n", "4711")])
def test_the_number_of_a_submitted_job_is_read(slurm: StandIns, text: str, number: str) -> None:
    slurm.answer("sbatch", text=text)
    assert LAUNCHER.submit(Submission(files={}, command=("sbatch", "--parsable", "x"))) == number
    slurm.answer("sbatch", text="")
    with pytest.raises(LaunchError, match="'' is not a number of a Slurm job"):
        LAUNCHER.submit(Submission(files={}, command=("sbatch", "--parsable", "x")))

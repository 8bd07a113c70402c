"""Launcher ``slurm``: sbatch, squeue, scontrol and scancel. Needs no accounting database."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from d9d_core.errors import LaunchError
from d9d_core.launcher import EngineStatus, LaunchRequest, LaunchState, Submission, answer_of

from d9d_slurm.config import SlurmConfig
from d9d_slurm.script import batch_script

#: Seconds within which a command of Slurm must answer; slurmctld may be busy for a minute.
_PATIENCE = 120
#: Bytes at the end of a log that are read.
_TAIL = 1 << 16
#: Columns of squeue with their widths. No column holds text of users.
_COLUMNS = (("State", 30), ("RestartCnt", 12), ("NodeList", 200), ("Reason", 100), ("exit_code", 12))
_STATES: Mapping[str, LaunchState] = MappingProxyType(
    {
        "PENDING": "waiting",
        "CONFIGURING": "waiting",
        "REQUEUED": "waiting",
        "REQUEUE_HOLD": "waiting",
        "REQUEUE_FED": "waiting",
        "SPECIAL_EXIT": "waiting",
        "RESV_DEL_HOLD": "waiting",
        "RUNNING": "running",
        "COMPLETING": "running",
        "SIGNALING": "running",
        "STAGE_OUT": "running",
        "STOPPED": "running",
        "SUSPENDED": "running",
        "RESIZING": "running",
        "COMPLETED": "finished",
        "CANCELLED": "cancelled",
    }
)


class SlurmLauncher:
    """Submits batch jobs to Slurm. A :class:`~d9d_core.launcher.Launcher`.

    Args:
        config: resources and restarts.
    """

    def __init__(self, config: SlurmConfig) -> None:
        self._config = config

    def require(self) -> None:
        """Check that Slurm's commands are installed and that its controller answers.

        Raises:
            LaunchError: the commands are not installed, or the controller does not answer.
        """
        missing = [name for name in ("sbatch", "squeue", "scontrol", "scancel") if shutil.which(name) is None]
        if missing:
            raise LaunchError(
                f"{', '.join(missing)} not found: Slurm's client commands are not installed on this machine, or not in "
                "PATH; run this command on a login node of the cluster, or print the files with --dry-run"
            )
        try:
            _run("scontrol", "ping")
        except LaunchError as error:
            raise LaunchError(
                f"Slurm's controller cannot be asked: {error}; run this command on a login node of the cluster, or "
                "print the files with --dry-run"
            ) from error

    def prepare(self, request: LaunchRequest) -> Submission:
        """Make the batch script, and the command that hands it to Slurm.

        Raises:
            LaunchError: Slurm's syntax for file names cannot express the path of the log.
        """
        if "\\" in str(request.folder):
            raise LaunchError(f"run.dir: {request.folder} has a backslash, which Slurm does not keep; rename it")
        script = request.folder / "slurm.sh"
        pattern = str(request.folder).replace("%", "%%")
        command = (
            "sbatch",
            "--parsable",
            f"--export={','.join(self._config.export) or 'NONE'}",
            f"--job-name={request.name}",
            f"--chdir={request.working_directory}",
            f"--output={pattern}/slurm-%j.log",
            str(script),
        )
        return Submission(files={script: batch_script(self._config, request)}, command=command)

    def submit(self, submission: Submission) -> str:
        """Run sbatch; return the number of the job.

        Raises:
            LaunchError: Slurm refused the job.
        """
        output = _run(*submission.command).strip()
        identifier = output.splitlines()[-1].partition(";")[0] if output else ""
        return _checked(identifier)

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        """Ask slurmctld about a job; it forgets a job some minutes after the job's end (``MinJobAge``).

        Raises:
            LaunchError: the identifier is malformed, or slurmctld does not answer.
        """
        number = _checked(identifier)
        log = _last_lines(folder / f"slurm-{number}.log", lines) if lines else ()
        columns = _columns(number)
        if columns is None:
            return EngineStatus(state="unknown", detail="Slurm no longer knows the job", log=log)
        word, restarts, nodes, reason, status = columns
        detail = word
        if nodes:
            detail += f" on {nodes}"
        if reason not in ("", "None"):
            detail += f", {reason}"
        if restarts not in ("", "0"):
            detail += f", restarts: {restarts}"
        state = _STATES.get(word, "failed")
        ended = state in ("finished", "failed") and status.isdecimal()
        # squeue prints the exit status as waitpid returns it: 19200 for an exit with 75.
        code = os.waitstatus_to_exitcode(int(status)) if ended else None
        return EngineStatus(state=state, detail=detail, log=log, exit_status=code)

    def cancel(self, identifier: str) -> str:
        """Forbid a requeue, then ask all ranks to save and stop; a job that trains nothing yet is ended at once.

        Raises:
            LaunchError: the identifier is malformed, or Slurm does not know the job any more.
        """
        number = _checked(identifier)
        columns = _columns(number)
        state = "unknown" if columns is None else _STATES.get(columns[0], "failed")
        if state not in ("waiting", "running"):
            raise LaunchError(f"job {number} has ended already, so that there is nothing to cancel")
        _run("scontrol", "update", f"JobId={number}", "Requeue=0")
        steps = _run("squeue", "--noheader", "--steps", f"--jobs={number}", "--format=%i").split()
        # A plain scancel would kill the job after KillWait, 30 seconds by default, in which a save may not fit.
        if any(re.fullmatch(rf"{number}\.\d+", step) for step in steps):
            _run("scancel", "--signal=TERM", number)
            return "all ranks finish their step, save and stop; the job is not restarted"
        _run("scancel", number)
        return "cancelled; it did not train"


def _checked(identifier: str) -> str:
    if not re.fullmatch(r"[0-9]{1,12}", identifier, re.ASCII):
        raise LaunchError(f"{identifier[:80]!r} is not a number of a Slurm job; look for the job with squeue --me")
    return identifier


def _columns(number: str) -> list[str] | None:
    """State, restarts, nodes, reason and exit status of a job; ``None`` if Slurm no longer knows the job."""
    wanted = ",".join(f"{name}:{width}" for name, width in _COLUMNS)
    try:
        line = _run("squeue", "--noheader", f"--jobs={number}", "--states=all", f"--Format={wanted}").rstrip("\n")
    except LaunchError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    if not line.strip():
        return None
    columns, start = [], 0
    for _, width in _COLUMNS:
        columns.append(line[start : start + width].strip())
        start += width
    return columns


def _last_lines(log: Path, count: int) -> tuple[str, ...]:
    if not log.is_file():  # the job has not started
        return ()
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        text = file.read().decode("utf-8", "replace")
    return tuple(text.splitlines()[-count:])


def _run(*command: str) -> str:
    """Standard output of a command of Slurm.

    Raises:
        LaunchError: the command is missing, failed or did not answer.
    """
    done = answer_of(
        command,
        seconds=_PATIENCE,
        missing=f"{command[0]} not found; run this command on a machine with Slurm's client commands",
        silent=f"{command[0]} did not answer within {_PATIENCE} s; is slurmctld running?",
    )
    if done.returncode != 0:
        # Slurm begins each line with the command's name.
        lines = [line.removeprefix(f"{command[0]}: ").strip() for line in (done.stderr or done.stdout).splitlines()]
        raise LaunchError(f"{command[0]}: {'; '.join(filter(None, lines)) or f'exit status {done.returncode}'}")
    return done.stdout

"""Launcher ``skypilot``: the command ``sky`` with the user's own clouds and rights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from d9d_core.errors import LaunchError
from d9d_core.launcher import EngineStatus, LaunchRequest, LaunchState, Submission, answer_of

from d9d_skypilot.config import SkyPilotConfig
from d9d_skypilot.task import task_file, task_name

#: Seconds within which a command of SkyPilot must answer, and within which SkyPilot must accept a submission; the first
#: submission starts a machine that controls the jobs, which takes long.
_PATIENCE, _PATIENCE_OF_SUBMIT = 180, 1800
_NAME = re.compile(r"d9d-[a-z0-9-]{1,60}", re.ASCII)
_STATES: Mapping[str, LaunchState] = {
    "PENDING": "waiting",
    "SUBMITTED": "waiting",
    "STARTING": "waiting",
    "RECOVERING": "waiting",
    "RUNNING": "running",
    "WINDING_DOWN": "running",
    "CANCELLING": "running",
    "SUCCEEDED": "finished",
    "CANCELLED": "cancelled",
}


class SkyPilotLauncher:
    """Submits managed jobs of SkyPilot. A :class:`~d9d_core.launcher.Launcher`.

    Args:
        config: machines and storage.
        now: clock, which tells the names of a run's submissions apart.
    """

    def __init__(self, config: SkyPilotConfig, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        self._config = config
        self._now = now

    def require(self) -> None:
        """Check that the command ``sky`` is installed.

        Raises:
            LaunchError: the command is not installed.
        """
        if shutil.which("sky") is None:
            raise LaunchError(
                "sky not found: pip install 'skypilot[aws]' (or another cloud) in an environment of its own and put it "
                "into PATH, or print the task with --dry-run"
            )

    def prepare(self, request: LaunchRequest) -> Submission:
        """Make the task file, and the command that hands it to SkyPilot, which reads the values of secrets itself.

        Raises:
            LaunchError: the machines cannot run the job.
        """
        file = request.folder / "skypilot.yaml"
        secrets = [word for name in self._config.secrets for word in ("--secret", name)]
        command = ("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, str(file))
        name = task_name(request.name, f"{self._now():%m%d%H%M%S}")
        return Submission(files={file: task_file(self._config, request, name)}, command=command)

    def submit(self, submission: Submission) -> str:
        """Hand the task to SkyPilot; return its name.

        Raises:
            LaunchError: SkyPilot refused the task.
        """
        (text,) = submission.files.values()
        name = _checked(text.partition("\n")[0].removeprefix("name: "))
        _run(*submission.command, patience=_PATIENCE_OF_SUBMIT)
        return name

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:  # noqa: ARG002 - Launcher
        """Ask SkyPilot about a job, and for the last log lines of the first machine.

        Raises:
            LaunchError: the identifier is malformed, or SkyPilot does not answer.
        """
        name = _checked(identifier)
        found = _record(name)
        if found is None:
            return EngineStatus(state="unknown", detail="SkyPilot does not know the job")
        word = str(found.get("status") or "")
        parts = [str(found[field]) for field in ("status", "failure_reason", "infra") if found.get(field)]
        if found.get("recovery_count"):
            parts.append(f"recovered: {found['recovery_count']}")
        state = _STATES.get(word, "failed" if word.startswith("FAILED") else "unknown")
        log = _log(name, lines) if lines and state != "waiting" else ()
        return EngineStatus(state=state, detail=", ".join(parts), log=log)

    def cancel(self, identifier: str) -> str:
        """Cancel a job: its ranks get SIGTERM, and the half minute that SkyPilot gives them to save.

        Raises:
            LaunchError: the identifier is malformed, or the job has ended or is unknown.
        """
        name = _checked(identifier)
        found = _record(name)
        state = _STATES.get(str((found or {}).get("status")), "failed")
        if found is None or state not in ("waiting", "running"):
            raise LaunchError(f"job {name} has ended already, or SkyPilot does not know it; nothing to cancel")
        graceful = ("--graceful",) if self._config.bucket is not None else ()
        _run("sky", "jobs", "cancel", "--yes", *graceful, "--name", name)
        return "all ranks finish their step, save and stop if that takes less than 30 s; the job is not restarted"


def _checked(identifier: str) -> str:
    if not _NAME.fullmatch(identifier):
        raise LaunchError(
            f"{identifier[:80]!r} is not the name of a job that d9d submitted; look for it with sky jobs queue"
        )
    return identifier


def _record(name: str) -> Mapping[str, Any] | None:
    """Newest record of a job in SkyPilot's queue; ``None`` if the queue does not have the job."""
    text = _run("sky", "jobs", "queue", "--all", "--output", "json")
    try:
        # The client may print notes before the list.
        records = json.loads(text[text.index("[") :])
    except ValueError as error:
        raise LaunchError(f"sky jobs queue: the answer is not JSON: {error}") from error
    found = [one for one in records if isinstance(one, dict) and one.get("job_name") == name]
    return found[0] if found else None


def _log(name: str, lines: int) -> tuple[str, ...]:
    try:
        text = _run("sky", "jobs", "logs", "--no-follow", "--tail", str(lines), "--name", name)
    except LaunchError:  # the machines are gone
        return ()
    return tuple(text.splitlines()[-lines:])


def _run(*command: str, patience: int = _PATIENCE) -> str:
    """Standard output of a command of SkyPilot.

    Raises:
        LaunchError: the command is missing, failed or did not answer.
    """
    done = answer_of(
        command,
        seconds=patience,
        missing="sky not found; run this command where SkyPilot is installed",
        silent=f"{' '.join(command[:3])} did not answer within {patience} s; see sky api status",
    )
    if done.returncode != 0:
        text = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise LaunchError(f"{' '.join(command[:3])}: {text[-1000:]}")
    return done.stdout

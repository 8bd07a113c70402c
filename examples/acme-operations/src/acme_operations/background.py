"""Launcher ``background``: runs a job on this machine, in processes that outlive the terminal."""

from __future__ import annotations

import os
import shlex
import signal
from pathlib import Path

from d9d_core.errors import LaunchError
from d9d_core.launcher import EXIT_FINISHED, EngineStatus, LaunchRequest, LaunchState, Submission

from acme_operations.config import BackgroundConfig

_LOG, _STATUS = "background.log", "background.status"


class Background:
    """Launcher that runs a script of the shell in the background; the process id identifies it."""

    def __init__(self, config: BackgroundConfig) -> None:
        self._config = config

    def require(self) -> None:
        """Check nothing: every machine has a shell."""

    def prepare(self, request: LaunchRequest) -> Submission:
        """Make the script. Paths are texts of users, so they are quoted."""
        if request.nodes != 1:
            raise LaunchError(f"--nodes {request.nodes}: background runs jobs on this machine; leave out --nodes")
        restarts = ["--max-restarts", str(self._config.restarts), "--nproc", str(request.processes)]
        lines = [
            f"cd {shlex.quote(str(request.working_directory))}",
            f"exec < /dev/null > {shlex.quote(str(request.folder / _LOG))} 2>&1",
            "trap : TERM  # the shell waits until the job has saved",
            shlex.join([*request.command, *restarts]),
            f"echo $? > {shlex.quote(str(request.folder / _STATUS))}",
        ]
        script = request.folder / "background.sh"
        return Submission(files={script: "\n".join(lines) + "\n"}, command=("sh", str(script)))

    def submit(self, submission: Submission) -> str:
        """Start the script in a session of its own."""
        for script in submission.files:
            script.with_name(_STATUS).unlink(missing_ok=True)
        # Not a Popen object, which would warn when it is dropped while the script runs.
        return str(os.posix_spawnp(submission.command[0], submission.command, os.environ, setsid=True))

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        """Read the exit status that the script wrote, or look for its process."""
        log = folder / _LOG
        text = log.read_text("utf-8", "replace").splitlines()[-lines:] if lines and log.exists() else []
        file = folder / _STATUS
        written = file.read_text().strip() if file.exists() else ""  # also empty if the machine stopped meanwhile
        if written:
            status = int(written)
            state: LaunchState = "finished" if status == EXIT_FINISHED else "failed"
            return EngineStatus(state=state, detail=f"status {status}", log=tuple(text), exit_status=status)
        try:
            os.kill(_process(identifier), 0)
        except (ProcessLookupError, PermissionError):  # a process of another user has the number by now
            if not log.exists():
                return EngineStatus(state="unknown", detail=f"process {identifier} was not started for this run")
            return EngineStatus(state="failed", detail="killed", log=tuple(text))
        return EngineStatus(state="running", detail=f"process {identifier}", log=tuple(text))

    def cancel(self, identifier: str) -> str:
        """Ask all processes of the session to save and stop."""
        try:
            os.killpg(_process(identifier), signal.SIGTERM)
        except (ProcessLookupError, PermissionError) as error:
            raise LaunchError(f"process {identifier} has ended already") from error
        return "the processes finish their step, save and stop"


def _process(identifier: str) -> int:
    if not identifier.isdecimal() or not 2 <= int(identifier[:12]) < 2**31:
        raise LaunchError(f"{identifier[:80]!r} is not a process id")
    return int(identifier)

"""Launchers: they submit a job to an engine that starts processes on other machines, such as Slurm.

Start here: :class:`Launcher` has five methods, which ``d9d launch`` calls::

    class Batch:
        def __init__(self, config): ...
        def require(self): ...                                      # raise LaunchError if `batch` is not installed
        def prepare(self, request):
            script = request.folder / "batch.sh"
            return Submission(files={script: shlex.join(request.command)}, command=("batch", "-f", str(script)))
        def submit(self, submission): ...                           # run the command, return the engine's identifier
        def status(self, identifier, folder, lines): ...            # ask the engine
        def cancel(self, identifier): ...

The exit status of a job's processes says whether a restart helps. It does not after :data:`EXIT_FINISHED` and
:data:`EXIT_FAILED`. After :data:`EXIT_STOPPED` and every other status, a launcher restarts the job, which then
continues from its newest checkpoint. A file in the run's directory states the same outcome: ``finished.json``,
``stopped.json`` or ``failed.json``.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from d9d_core.errors import LaunchError

__all__ = [
    "EXIT_FAILED", "EXIT_FINISHED", "EXIT_STOPPED", "EngineStatus", "LaunchRequest", "LaunchState", "Launcher",
    "Submission", "answer_of",
]  # fmt: skip

#: Exit status of a finished run. A restart would train nothing.
EXIT_FINISHED = 0
#: Exit status of an error in the job, its data or its environment. A restart would repeat the error.
EXIT_FAILED = 2
#: Exit status after a stop request, with all progress saved; a restart continues. ``EX_TEMPFAIL`` of sysexits.h.
EXIT_STOPPED = 75

#: State of a submission: waits for machines or a restart; runs; ended; or the engine no longer knows it.
LaunchState: TypeAlias = Literal["waiting", "running", "finished", "failed", "cancelled", "unknown"]


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """Request to run a job on machines of an engine. All paths are absolute.

    Paths may contain any characters except control characters, so a launcher must quote them in scripts and files.

    Attributes:
        name: name of the run: letters, digits, ``_``, ``-`` and ``.``.
        command: arguments of each process, beginning with the interpreter; they include ``job_file``.
        job: text of the job file, with all defaults and overrides filled in.
        job_file: path at which ``d9d launch`` writes ``job``, in ``folder``.
        folder: directory of the submission, in the run's directory, which all machines share.
        working_directory: directory in which the processes start; relative paths in the job start from it.
        nodes: number of machines.
        processes: number of processes on each machine.
        device: type of device of the job, such as ``cuda``; ``auto`` for the best that a machine has.
        source: the user's job file, of which ``job`` is a copy; ``None`` if unknown.
        source_sha256: SHA-256 of that file, in hexadecimal digits, when the copy was made; empty if unknown.

    Raises:
        LaunchError: a path or an argument of the command has a control character.
    """

    name: str
    command: tuple[str, ...]
    job: str
    job_file: Path
    folder: Path
    working_directory: Path
    nodes: int
    processes: int
    device: str = "auto"
    source: Path | None = None
    source_sha256: str = ""

    def __post_init__(self) -> None:
        for text in (*self.command, str(self.folder), str(self.working_directory), str(self.source)):
            if any(ord(character) < 32 or ord(character) == 127 for character in text):
                raise LaunchError(f"{text!r} has a control character, such as a line break; rename it")


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Files to write and the command to run, as ``d9d launch submit --dry-run`` prints them.

    Attributes:
        files: path -> text; the paths are in :attr:`LaunchRequest.folder`. Texts contain no tokens.
        command: arguments of the command that submits; nothing is interpreted by a shell.
    """

    files: Mapping[Path, str]
    command: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """Status of a submission, as the engine reports it.

    Attributes:
        state: state of the submission.
        detail: one line with further information from the engine: its own word for the state, reasons, machines.
        log: last lines that the processes printed.
        exit_status: exit status of the ended job; ``None`` if it runs, or if the engine does not tell.
    """

    state: LaunchState
    detail: str
    log: tuple[str, ...] = ()
    exit_status: int | None = None


class Launcher(Protocol):
    """Interface of a launch engine, such as Slurm or Kubernetes; methods do not need torch.

    Launchers are made by the build function of a :class:`~d9d_core.plugin.LauncherSpec`.
    """

    def require(self) -> None:
        """Check that the engine can be used from this machine.

        Raises:
            LaunchError: it cannot; the text says what to install or to start.
        """
        ...

    def prepare(self, request: LaunchRequest) -> Submission:
        """Make the submission of a request. Writes and starts nothing, and works without the launch engine.

        No variable of the environment goes into the submission, because variables may hold tokens.

        Raises:
            LaunchError: the launch engine cannot run the request.
        """
        ...

    def submit(self, submission: Submission) -> str:
        """Hand a submission, whose files are written, to the engine; return the engine's identifier.

        Raises:
            LaunchError: the engine refused the submission.
        """
        ...

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        """Ask the engine about a submission.

        Args:
            identifier: identifier that :meth:`submit` returned, read from a file, so it may be malformed.
            folder: :attr:`LaunchRequest.folder` of the submission.
            lines: largest number of lines of the log.

        Raises:
            LaunchError: the identifier is malformed, or the engine does not answer.
        """
        ...

    def cancel(self, identifier: str) -> str:
        """End a submission for good: ranks that train save first. Returns without waiting for the end.

        Returns:
            What happens now, as a sentence for the user.

        Raises:
            LaunchError: the identifier is malformed, or the engine does not answer.
        """
        ...


def answer_of(
    command: Sequence[str],
    *,
    seconds: float,
    missing: str,
    silent: str,
    environ: Mapping[str, str] | None = None,
    joined: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a command of an engine, without a shell and without input, and return its output and exit status.

    Args:
        command: the command and its arguments.
        seconds: time limit.
        missing: message if the command is not installed.
        silent: message if the command does not answer in time.
        environ: environment variables; ``None`` takes the variables of this process.
        joined: whether standard error is merged into standard output.

    Raises:
        LaunchError: the command is not installed, or does not answer in time.
    """
    try:
        return subprocess.run(  # noqa: S603 - launchers check the names that they insert
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if joined else subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
            env=environ,
        )
    except FileNotFoundError as error:
        raise LaunchError(missing) from error
    except subprocess.TimeoutExpired as error:
        raise LaunchError(silent) from error

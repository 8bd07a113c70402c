"""Launcher ``ray``: a driver of Ray Train on this machine, or on the cluster by Ray's job server."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from d9d_core.errors import LaunchError
from d9d_core.launcher import EXIT_FINISHED, EngineStatus, LaunchRequest, LaunchState, Submission, answer_of

from d9d_ray.causes import clear_causes
from d9d_ray.config import RayConfig
from d9d_ray.order import END, LOG, ORDER, STOP, TRAINS, Order

#: Seconds within which Ray's job server must answer.
_PATIENCE = 120
#: Bytes at the end of a log that are read.
_TAIL = 1 << 20
#: Seconds after which the job server kills a cancelled driver; longer than a save takes.
_GRACE = 1800
_MODULE = "d9d_ray.driver"
_IDENTIFIER = re.compile(r"(process)/([A-Za-z0-9._-]{1,253})/([1-9]\d{0,9})|(job)/([A-Za-z0-9_.-]{1,128})", re.ASCII)
#: Prefix that Ray puts before a line that a worker printed.
_OWN = re.compile(r"^(?:\x1b\[\d+m)*\((?:RayTrainWorker|d9d) pid=\d+(?:, ip=[^)]*)?\)(?:\x1b\[\d+m)* ?")
_JOB_STATES: dict[str, LaunchState] = {
    "PENDING": "waiting",
    "RUNNING": "running",
    "was stopped": "cancelled",
    "succeeded": "finished",
    "failed": "failed",
}


class RayLauncher:
    """Trains with Ray Train, one worker per rank. A :class:`~d9d_core.launcher.Launcher`.

    Args:
        config: cluster, resources and restarts.
    """

    def __init__(self, config: RayConfig) -> None:
        self._config = config

    def require(self) -> None:
        """Check that Ray is installed, and that the job server answers, if there is one.

        Raises:
            LaunchError: Ray is not installed, the job server does not answer, or the address is of Ray's client.
        """
        server = self._server()
        if server is None and find_spec("ray") is None:
            raise LaunchError(
                "ray is not installed in this environment; pip install 'ray[train]', or give the address of a "
                "cluster's job server: --option address=http://HEAD:8265"
            )
        if server is not None:
            if shutil.which("ray") is None:
                raise LaunchError(f"the command ray, which talks to {server}, is missing: pip install 'ray[default]'")
            self._ray("job", "list")

    def prepare(self, request: LaunchRequest) -> Submission:
        """Make the order of the run, and the command of the driver, or the command that hands the driver to the server.

        Raises:
            LaunchError: the job server would not get the variables of ``export``.
        """
        gpus = self._config.gpus_per_process
        if gpus is None:
            gpus = 0.0 if request.device == "cpu" else 1.0
        order = Order(
            name=request.name,
            job=str(request.job_file),
            options=list(request.command[request.command.index(str(request.job_file)) + 1 :]),
            folder=str(request.folder),
            working_directory=str(request.working_directory),
            processes=request.nodes * request.processes,
            resources={"CPU": self._config.cpus_per_process, **({"GPU": gpus} if gpus else {})},
            restarts=self._config.restarts,
            startup=self._config.startup,
            address=self._config.address,
            export=self._config.export,
        )
        file = request.folder / ORDER
        driver = (request.command[0], "-m", _MODULE, file.as_uri())
        server = self._server()
        if server is None:
            return Submission(files={file: order.text()}, command=driver)
        if self._config.export:
            raise LaunchError(
                "export: Ray's job server would show the values to all users of the cluster; set the variables on the "
                "machines of the cluster, and leave out --option export"
            )
        address = ("--address", self._config.address) if self._config.address else ()
        patience = json.dumps({"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(_GRACE)}})
        command = ("ray", "job", "submit", *address, "--no-wait", "--runtime-env-json", patience, "--", *driver)
        return Submission(files={file: order.text()}, command=command)

    def submit(self, submission: Submission) -> str:
        """Start the driver in a session of its own, or hand it to the job server.

        Returns:
            ``process/HOST/PID`` of the driver, or ``job/ID`` of the job server.

        Raises:
            LaunchError: the job server refused the job.
        """
        folder = next(iter(submission.files)).parent
        for name in (END, STOP, TRAINS):
            (folder / name).unlink(missing_ok=True)
        clear_causes(folder)
        if submission.command[0] == "ray":
            text = self._run(*submission.command)
            found = re.search(r"Job '([A-Za-z0-9_.-]+)' submitted", text)
            if found is None:
                raise LaunchError(f"ray job submit does not say which job it made: {text.strip()[-300:]!r}")
            return f"job/{found[1]}"
        with (folder / LOG).open("wb") as log:
            started = subprocess.Popen(  # noqa: S603 - our own module
                submission.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        started.returncode = 0  # it outlives this process, of which Python would warn
        return f"process/{_host()}/{started.pid}"

    def status(self, identifier: str, folder: Path, lines: int) -> EngineStatus:
        """Read how the driver ended, or ask whether it runs.

        Raises:
            LaunchError: the identifier is malformed or of another machine, or the job server does not answer.
        """
        kind, name = _parts(identifier)
        if kind == "job":
            return self._job_status(name, folder, lines)
        log = _own_lines(_tail(folder / LOG), lines)
        if (end := _ending(folder)) is not None:
            state: LaunchState = "finished" if end["status"] == EXIT_FINISHED else "failed"
            return EngineStatus(state=state, detail=_detail(end), log=log, exit_status=end["status"])
        if _runs(name):
            state = "running" if (folder / TRAINS).exists() else "waiting"
            return EngineStatus(state=state, detail=f"driver is process {name} of {_host()}", log=log)
        if not (folder / LOG).exists():
            return EngineStatus(state="unknown", detail=f"process {name} is no driver of this run")
        return EngineStatus(state="failed", detail=f"driver, process {name}, was killed", log=log)

    def cancel(self, identifier: str) -> str:
        """Ask the driver to let all ranks save and stop.

        Raises:
            LaunchError: the identifier is malformed or of another machine, or the driver has ended.
        """
        kind, name = _parts(identifier)
        if kind == "job":
            state, _ = self._job_state(name)
            if state not in ("waiting", "running"):
                raise LaunchError(f"job {name} of Ray is {state}, so that there is nothing to cancel")
            self._ray("job", "stop", "--no-wait", name)
        else:
            if not _runs(name):
                raise LaunchError(f"process {name} is no driver, or has ended already, so there is nothing to cancel")
            with suppress(ProcessLookupError):
                os.kill(int(name), signal.SIGTERM)
        return "all ranks finish their step, save and stop; the job is not restarted"

    def _server(self) -> str | None:
        """Address of Ray's job server; ``None`` if the driver runs on this machine.

        Raises:
            LaunchError: the address is one of Ray's client, by which Ray Train cannot be used.
        """
        address = self._config.address or os.environ.get("RAY_ADDRESS", "")
        if address.startswith("ray://"):
            raise LaunchError(
                "RAY_ADDRESS is an address of Ray's client, ray://; use the job server instead: "
                "--option address=http://HEAD:8265"
            )
        return address if address.startswith(("http://", "https://")) else None

    def _job_state(self, name: str) -> tuple[LaunchState, str]:
        try:
            text = self._ray("job", "status", name)
        except LaunchError as error:
            if "does not exist" not in str(error):
                raise
            return "unknown", "Ray no longer knows the job"
        said = re.sub(r"\x1b\[[\d;]*m", "", text)
        ended = re.search(rf"Job '{re.escape(name)}' (succeeded|failed|was stopped)", said)
        found = ended or re.search(rf"Status for job '{re.escape(name)}': (\w+)", said)
        if found is None:
            raise LaunchError(f"ray job status {name}: the answer has no status: {said.strip()[-300:]!r}")
        return _JOB_STATES.get(found[1], "unknown"), found[1]

    def _job_status(self, name: str, folder: Path, lines: int) -> EngineStatus:
        state, detail = self._job_state(name)
        end = _ending(folder)
        log: tuple[str, ...] = ()
        if lines and state != "unknown":
            log = _own_lines(self._ray("job", "logs", name).splitlines(), lines)
        if end is not None:
            # The server learns of the end some seconds later, and does not tell whether a stopped job has saved.
            return EngineStatus(
                state="failed" if end["status"] != EXIT_FINISHED else "finished",
                detail=f"{detail}; {_detail(end)}",
                log=log,
                exit_status=end["status"],
            )
        return EngineStatus(state=state, detail=detail, log=log)

    def _ray(self, *words: str) -> str:
        address = ("--address", self._config.address) if self._config.address else ()
        return self._run("ray", *words[:2], *address, *words[2:])

    @staticmethod
    def _run(*command: str) -> str:
        """Output of a command of Ray.

        Raises:
            LaunchError: the command is missing, failed or did not answer.
        """
        done = answer_of(
            command,
            seconds=_PATIENCE,
            missing="the command ray is missing: pip install 'ray[default]'",
            silent=f"ray did not answer within {_PATIENCE} s; is the cluster reachable?",
            environ={**os.environ, "RAY_COLOR_PREFIX": "0", "NO_COLOR": "1"},
            joined=True,
        )
        if done.returncode != 0:
            lines = done.stdout.strip().splitlines()
            raise LaunchError(f"ray {' '.join(command[1:3])}: {lines[-1] if lines else f'status {done.returncode}'}")
        return done.stdout


def _parts(identifier: str) -> tuple[str, str]:
    """Kind of an identifier, and the number of the process or the name of the job.

    Raises:
        LaunchError: the identifier is malformed, or the process is one of another machine.
    """
    found = _IDENTIFIER.fullmatch(identifier)
    if found is None:
        raise LaunchError(
            f"{identifier[:80]!r} is not process/HOST/PID or job/ID of a submission to Ray; "
            "find the ID of a job with ray job list"
        )
    if found[4]:
        return "job", found[5]
    if found[2] != _host():
        raise LaunchError(f"the driver runs on {found[2]}, and this is {_host()}; run this command there")
    return "process", found[3]


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()) or "localhost"


def _runs(number: str) -> bool:
    """Whether a process exists and is a driver; the number of an ended process may belong to another program."""
    try:
        return _MODULE.encode() in Path(f"/proc/{number}/cmdline").read_bytes()
    except OSError:
        if Path("/proc/self/cmdline").exists():
            return False
    found = subprocess.run(["ps", "-o", "args=", "-p", number], capture_output=True, check=False)  # noqa: S603, S607
    return _MODULE.encode() in found.stdout


def _ending(folder: Path) -> dict[str, Any] | None:
    """Exit status and cause that the driver wrote; ``None`` if it has not ended."""
    try:
        values = json.loads((folder / END).read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) and type(values.get("status")) is int else None


def _detail(end: dict[str, Any]) -> str:
    cause = str(end.get("cause") or "").strip().splitlines()
    reported = f", reported step {end['reported']}" if end.get("reported") else ""
    return f"status {end['status']}{reported}" + (f": {cause[-1][:300]}" if cause else "")


def _tail(log: Path) -> list[str]:
    if not log.is_file():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - _TAIL))
        return file.read().decode("utf-8", "replace").splitlines()


def _own_lines(text: list[str], count: int) -> tuple[str, ...]:
    """Last lines that the run printed, without Ray's prefix; Ray's own last lines if the run has printed none."""
    own = [line[found.end() :] for line in text if (found := _OWN.match(line))]
    return tuple((own or text)[-count:]) if count else ()

"""Starts a lighthouse and the replicas of a job on this machine, and restarts replicas that die. Imports no torch."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from d9d_core.errors import LaunchError
from d9d_core.launcher import EXIT_STOPPED

from d9d_torchft.settings import LIGHTHOUSE, LOOPBACK, REPLICA, TOKEN_FILE

#: Exit status of a replica with an error in the job, which a restart would repeat.
_JOB_ERROR = 2
#: Seconds between two checks of the replicas, and seconds within which the lighthouse must start.
_TICK, _START = 0.05, 120.0
#: Seconds after the first replica has finished the job within which the other replicas must end.
_LAST = 60.0
#: Seconds to wait for the last lines of a replica that has ended.
_FORWARD = 5.0


@dataclass
class Replica:
    """Process of one replica.

    Attributes:
        name: name of the replica.
        process: newest process of the replica.
        starts: number of times that it was started.
    """

    name: str
    process: subprocess.Popen[str]
    starts: int = 1


class Supervisor:
    """Lighthouse and replicas of one job on this machine.

    Args:
        command: function from the name of a replica to its command.
        names: names of the replicas.
        restarts: largest number of restarts of each replica.
        say: function that prints a line.
    """

    def __init__(
        self, command: Callable[[str], Sequence[str]], names: Sequence[str], restarts: int, say: Callable[[str], None]
    ) -> None:
        self._command = command
        self._names = list(names)
        self._restarts = restarts
        self._say = say
        self._stopping = False
        self._forwarding: list[threading.Thread] = []
        self.replicas: dict[str, Replica] = {}

    def run(self) -> int:
        """Start everything, and wait until the replicas have ended; return the exit status.

        0 if a replica has finished the job, 75 if the replicas were asked to stop, 2 after an error in the job, else 1.

        Raises:
            LaunchError: the lighthouse did not start, or has died.
        """
        with _token_file() as token:
            previous = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
            lighthouse = started_lighthouse()
            try:
                environ = {**os.environ, LIGHTHOUSE: lighthouse.address, TOKEN_FILE: token}
                return self._supervised(environ, lighthouse.process)
            finally:
                for replica in self.replicas.values():
                    if replica.process.poll() is None:
                        replica.process.kill()
                        replica.process.wait()
                for thread in self._forwarding:
                    thread.join(_FORWARD)
                lighthouse.process.kill()
                lighthouse.process.wait()
                for number, handler in previous.items():
                    signal.signal(number, handler)

    def _supervised(self, environ: Mapping[str, str], lighthouse: subprocess.Popen[str]) -> int:
        for name in self._names:
            self.replicas[name] = Replica(name, self._started(name, environ))
        last: float | None = None  # time until which the other replicas may end after the first one has finished
        while True:
            statuses = {one.name: one.process.poll() for one in self.replicas.values()}
            if _JOB_ERROR in statuses.values():
                self._say("a replica ended with an error in the job; all replicas end")
                return _JOB_ERROR
            if lighthouse.poll() is not None:
                raise LaunchError("the lighthouse has died; start the command again, it continues from checkpoints")
            if last is None and 0 in statuses.values():
                last = time.monotonic() + _LAST  # all replicas make the same last step
            for name, status in statuses.items():
                if status is not None and last is None and not self._stopping:
                    self._restart(self.replicas[name], status, environ)
            ended = all(one.process.poll() is not None for one in self.replicas.values())
            if ended or (last is not None and time.monotonic() > last):
                break
            time.sleep(_TICK)
        found = set(statuses.values())
        return 0 if 0 in found else EXIT_STOPPED if self._stopping and EXIT_STOPPED in found else 1

    def _restart(self, replica: Replica, status: int, environ: Mapping[str, str]) -> None:
        if replica.starts > self._restarts:
            return
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self._say(f"{replica.name} {how}; restart {replica.starts} of {self._restarts}")
        replica.starts += 1
        replica.process = self._started(replica.name, environ)

    def _started(self, name: str, environ: Mapping[str, str]) -> subprocess.Popen[str]:
        process = subprocess.Popen(  # noqa: S603 - d9d itself
            self._command(name),
            env={**environ, REPLICA: name},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            errors="replace",  # a line may have invalid bytes
            start_new_session=True,  # Ctrl-C reaches this process only, which then asks the replicas to stop
        )
        thread = threading.Thread(target=self._forward, args=(name, process), daemon=True)
        thread.start()
        self._forwarding.append(thread)
        return process

    def _forward(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._say(f"{name}: {line.rstrip()}")

    def _stop(self, _number: int, _frame: object) -> None:
        self._stopping = True
        for replica in self.replicas.values():
            if replica.process.poll() is None:
                replica.process.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class LighthouseProcess:
    """Process that serves a lighthouse.

    Attributes:
        process: the process.
        address: address for replicas, ``http://HOST:PORT``.
    """

    process: subprocess.Popen[str]
    address: str


def started_lighthouse() -> LighthouseProcess:
    """Start a lighthouse at a free port of the loopback.

    Raises:
        LaunchError: the lighthouse did not start.
    """
    command = [sys.executable, "-m", "d9d_core", "torchft", "lighthouse", "--address", f"{LOOPBACK}:0", "--child"]
    # Start the lighthouse in a session of its own, so that Ctrl-C does not end it before the replicas.
    process = subprocess.Popen(  # noqa: S603 - d9d itself
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    timer = threading.Timer(_START, process.kill)
    timer.start()
    with process.stdout, process.stderr:
        line = process.stdout.readline()
        timer.cancel()
        reason = "" if line.startswith("lighthouse: ") else process.stderr.read().strip().removeprefix("error: ")
    if not line.startswith("lighthouse: "):
        process.kill()
        process.wait()
        raise LaunchError(f"the lighthouse did not start: {reason or 'no answer'}")
    return LighthouseProcess(process, line.removeprefix("lighthouse: ").strip())


@contextmanager
def _token_file() -> Iterator[str]:
    """Context with the path of a file with a new token, readable by this user only.

    On Linux the file is in memory and disappears with this process.
    """
    token = secrets.token_hex(32).encode()
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("d9d-torchft-token")
        try:
            os.fchmod(descriptor, 0o600)
            os.write(descriptor, token)
            yield f"/proc/{os.getpid()}/fd/{descriptor}"
        finally:
            os.close(descriptor)
        return
    with tempfile.TemporaryDirectory(prefix="d9d-torchft-") as folder:
        file = Path(folder) / "token"
        file.touch(0o600)
        file.write_bytes(token)
        yield str(file)

"""Code of a launched process: prefixes warnings, reports a failure once, and exits if the launcher dies."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from d9d_core.deprecation import DeprecatedNameWarning
from d9d_core.untrusted import visible

import d9d_engine
from d9d_engine.launch.link import Link
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import STOPPED, Interrupts, stop_signals
from d9d_engine.supervision.failure import ErrorFile, Failure, FailureReporter, Listener

#: Environment variable with the file in which torch's elastic agent expects the failure.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: Environment variable that torch's elastic agent sets in the processes that it starts.
_AGENT = "TORCHELASTIC_RUN_ID"
#: Exit status of a process whose launcher has died; a shell shows the same for SIGTERM.
ENDED = 128 + signal.SIGTERM
#: Files left out of reported tracebacks: frames between the command line and the job.
_HIDDEN = {
    contextlib.__file__,
    *(str(Path(d9d_engine.__path__[0]) / name) for name in ("joining.py", "launch/start.py", "distributed/world.py")),
}


class Process:
    """Process that a launcher started as one of several; made by :func:`running`.

    Args:
        env: rank and sizes of this process.
        listener: receives the failure of this process; ``None`` without a launcher that reads it.
        repeats: whether messages about the job file are omitted, because the launcher or rank 0 prints them already.
        stop_status: exit status after a stop request.

    Attributes:
        failed_elsewhere: function that returns whether another rank has failed, as far as this process can know.
        interrupted: function to call when this process ends by a second Ctrl-C.
    """

    def __init__(self, env: ProcessEnv, listener: Listener | None, repeats: bool, stop_status: int = STOPPED) -> None:
        self.env = env
        self.repeats = repeats
        self.stop_status = stop_status
        self.failed_elsewhere: Callable[[], bool] = lambda: False
        self.interrupted: Callable[[], None] = lambda: None
        self._listener = listener
        self._reporter: FailureReporter | None = None
        self._name = f"rank {env.rank}"

    def reporter(self, name: str) -> FailureReporter:
        """Make the reporter of this rank's failure.

        Args:
            name: rank with its coordinates, known once the job is loaded; used in warnings from now on.
        """
        self._name = name
        self._reporter = FailureReporter(f"{name} on {self.env.node}", self._listener, hide=_HIDDEN)
        return self._reporter

    def fail(self, error: Exception) -> NoReturn:
        """End the process with an error, and report the error unless it was already reported."""
        failure = Failure.of(error, f"{self._name} on {self.env.node}")
        if self._reporter is None or not self._reporter.told:
            # The ranks have not joined, so each one reports its own failure.
            reporter = self._reporter or FailureReporter(failure.text, self._listener)
            reporter.tell(failure, claim=lambda name: name)
        # If another rank's failure caused this one, use that exit status: launchers then decide alike about a restart.
        sys.exit(failure.exit_code if self._reporter is None else self._reporter.exit_code)

    def warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        """Print a warning with the rank; replaces ``warnings.showwarning``."""
        if issubclass(category, DeprecatedNameWarning):  # rank 0, which has the same plugins, prints it
            return
        text = warnings.formatwarning(message, category, filename, lineno, "")
        print(visible(f"{self._name}: {text}"), end="", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def running(env: ProcessEnv, environ: Mapping[str, str], interrupts: Interrupts) -> Iterator[Process]:
    """Run the block as a launched process of a job: an exception ends the process and is reported once.

    Without a launcher, the block just runs.

    Args:
        env: rank and sizes of this process.
        environ: environment variables of this process.
        interrupts: receives the launcher's stop requests.
    """
    link = Link.from_environment(environ)
    listener = link or (ErrorFile(Path(environ[ERROR_FILE])) if ERROR_FILE in environ else None)
    # torch's agent restarts processes after any status but 0.
    stop_status = 0 if link is None and _AGENT in environ else STOPPED
    process = Process(env, listener, env.rank != 0 or link is not None, stop_status)
    if env.launcher is None:
        yield process
        return
    if link is not None:
        _follow(link, interrupts, process)
    early_stops = _early_stops(process, interrupts) if link is None else contextlib.nullcontext()
    with warnings.catch_warnings(), early_stops:
        if env.rank != 0:
            warnings.showwarning = process.warn  # type: ignore[assignment]
        try:
            yield process
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            process.fail(error)
    if link is not None:
        link.send(done=True)


@contextlib.contextmanager
def _early_stops(process: Process, interrupts: Interrupts) -> Iterator[None]:
    """End this rank at once, in a thread, if a stop signal other than Ctrl-C arrives before the rank has progress.

    A cluster manager signals all ranks. If a launcher signals only one rank, the other ranks end with an error, as
    they do whenever a rank dies during start-up.
    """
    reading = _signals_as_bytes()
    trains = threading.Event()
    interrupts.entered = trains.set
    asking = [signal.Signals(number).name for number in stop_signals()]

    def watch() -> None:
        asked = interrupts.requested  # a request from before this function was called
        while not trains.is_set():
            if asked is not None:
                # After a failure, srun signals the other ranks, whose exit status must not hide the failure.
                if process.failed_elsewhere():
                    os._exit(1)
                if process.env.rank == 0:
                    os.write(2, f"{asked}: stopped during start-up; nothing was trained\n".encode())
                os._exit(process.stop_status)
            names = [signal.Signals(number).name for number in os.read(reading, 64)]
            asked = next((name for name in names if name in asking), None)

    threading.Thread(target=watch, name="d9d-early-stop", daemon=True).start()
    try:
        yield
    finally:
        trains.set()


def _signals_as_bytes() -> int:
    """Pipe from which a thread reads arriving signals; the main thread may be blocked, as it waits for another rank."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # Signals sent to a forked child, such as a plugin's worker, do not concern this process.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    return reading


def _follow(link: Link, interrupts: Interrupts, process: Process | None = None) -> None:
    """Watch, in a thread, for stop requests of the launcher and for signals; exit if the launcher dies.

    A stop request from the launcher is passed to ``interrupts``. A SIGINT, SIGTERM or SIGHUP (unless it is ignored)
    sent to this process is forwarded to the launcher, which asks all processes; a second Ctrl-C also goes to the
    ranks of other machines.
    """
    reading = _signals_as_bytes()
    interrupts.entered = lambda: link.send(training=True)
    asking = (signal.SIGINT, *stop_signals())

    def watch() -> None:
        stopping = False
        try:
            while True:
                ready, _, _ = select.select([reading, link.connection.fileno()], [], [])
                # Messages first: the launcher sends its request before it passes on a second Ctrl-C as a signal.
                for message in link.receive() if link.connection.fileno() in ready else ():
                    interrupts.request(message["stop"])
                    stopping = True
                for number in os.read(reading, 64) if reading in ready else b"":
                    if number in asking:
                        link.send(asked=signal.Signals(number).name)
                    if number == signal.SIGINT and stopping and process is not None:
                        process.interrupted()
        except EOFError:
            os._exit(ENDED)

    threading.Thread(target=watch, name="d9d-launcher-watch", daemon=True).start()

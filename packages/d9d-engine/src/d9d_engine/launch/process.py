"""Process of a job: its warnings, its failure, and its end with the launcher that started it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from d9d_core.untrusted import visible

import d9d_engine
from d9d_engine.launch.link import Link
from d9d_engine.process_env import ProcessEnv
from d9d_engine.run.interrupt import Interrupts, stop_signals
from d9d_engine.supervision.failure import ErrorFile, Failure, FailureReporter, Listener

#: Where an elastic agent wants to read why a process failed.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: Exit status of a process whose launcher is gone: what a shell shows for SIGTERM.
ENDED = 128 + signal.SIGTERM
#: Between the command line and what it runs.
_HIDDEN = {
    contextlib.__file__,
    *(str(Path(d9d_engine.__path__[0]) / name) for name in ("joining.py", "launch/start.py", "distributed/world.py")),
}


class Process:
    """Process that a launcher started among several for a job; made by :func:`running`.

    Args:
        env: which one.
        listener: who wants to know why it fails.
        repeats: what is true of the job file alone has been said, by the launcher or by rank 0.
    """

    def __init__(self, env: ProcessEnv, listener: Listener | None, repeats: bool) -> None:
        self.env = env
        self.repeats = repeats
        self._listener = listener
        self._reporter: FailureReporter | None = None
        self._name = f"rank {env.rank}"

    def reporter(self, name: str) -> FailureReporter:
        """Reporter of the failure of this rank.

        Args:
            name: the rank with its coordinates, which are known once the job is; warnings show it from now on.
        """
        self._name = name
        self._reporter = FailureReporter(f"{name} on {self.env.node}", self._listener, hide=_HIDDEN)
        return self._reporter

    def fail(self, error: Exception) -> NoReturn:
        """End the process, and report the reason unless that was done."""
        failure = Failure.of(error, f"{self._name} on {self.env.node}")
        if self._reporter is None or not self._reporter.told:
            # The ranks have not met, so nobody knows whether others say the same.
            reporter = self._reporter or FailureReporter(failure.text, self._listener)
            reporter.tell(failure, claim=lambda name: name)
        sys.exit(failure.exit_code)

    def warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        """Replacement of ``warnings.showwarning``: says which rank warns."""
        text = warnings.formatwarning(message, category, filename, lineno, "")
        print(visible(f"{self._name}: {text}"), end="", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def running(env: ProcessEnv, environ: Mapping[str, str], interrupts: Interrupts) -> Iterator[Process]:
    """Run as a launched process of a job inside the block: an error that leaves it ends the process, reported once.

    A process that nobody started as one of several just runs the block.

    Args:
        env: which process.
        environ: its environment variables.
        interrupts: what the launcher asks for arrives there.
    """
    link = Link.from_environment(environ)
    listener = link or (ErrorFile(Path(environ[ERROR_FILE])) if ERROR_FILE in environ else None)
    process = Process(env, listener, repeats=env.rank != 0 or link is not None)
    if env.launcher is None:
        yield process
        return
    if link is not None:
        _follow(link, interrupts)
    with warnings.catch_warnings():
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


def _follow(link: Link, interrupts: Interrupts) -> None:
    """Do what the launcher asks, tell it what others ask, and end this process when it is gone.

    Whoever asks one process asks all: the main thread may be waiting for another rank, and is then not reached by a
    signal. Python notes it in this file at once, whatever the main thread does.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    # What is sent to a forked process, such as a worker of a plugin, is not for this one.
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    interrupts.entered = lambda: link.send(training=True)
    asking = (signal.SIGINT, *stop_signals())

    def watch() -> None:
        try:
            while True:
                ready, _, _ = select.select([reading, link.connection.fileno()], [], [])
                for number in os.read(reading, 64) if reading in ready else b"":
                    if number in asking:
                        link.send(asked=signal.Signals(number).name)
                for message in link.receive() if link.connection.fileno() in ready else ():
                    interrupts.request(message["stop"])
        except EOFError:
            os._exit(ENDED)

    threading.Thread(target=watch, name="d9d-launcher-watch", daemon=True).start()

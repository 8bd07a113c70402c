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

import d9d_engine
from d9d_engine.launch.channel import Channel
from d9d_engine.process_env import ProcessEnv
from d9d_engine.supervision.failure import Failure, FailureReporter

#: Where an elastic agent wants to read why a process failed.
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
#: Exit status of a process that was told to end: what a shell shows for SIGTERM.
ENDED = 128 + signal.SIGTERM
#: How long a process may go on after the agent told it to end because another one failed.
_LAST_SECONDS = 2.0
#: Between the command line and what it runs.
_HIDDEN = {
    contextlib.__file__,
    *(str(Path(d9d_engine.__path__[0]) / name) for name in ("job.py", "distributed/world.py")),
}


class Process:
    """Process of a job among several; made by :func:`running`.

    Args:
        env: which one.
        file: where the agent wants to read errors.
        repeats: what is true of the job file alone has been said, by the launcher or by rank 0.
    """

    def __init__(self, env: ProcessEnv, file: Path | None, repeats: bool) -> None:
        self.env = env
        self.repeats = repeats
        self._file = file
        self._reporter: FailureReporter | None = None
        self._name = f"rank {env.rank}"

    def reporter(self, name: str) -> FailureReporter:
        """Reporter of the failure of this rank.

        Args:
            name: the rank with its coordinates, which are known once the job is; warnings show it from now on.
        """
        self._name = name
        self._reporter = FailureReporter(f"{name} on {self.env.node}", self._file, hide=_HIDDEN)
        return self._reporter

    def fail(self, error: Exception) -> NoReturn:
        """End the process, and report the reason unless that was done."""
        failure = Failure.of(error, f"{self._name} on {self.env.node}")
        if self._reporter is None or not self._reporter.told:
            # The ranks have not met, so nobody knows whether others say the same.
            (self._reporter or FailureReporter(failure.text, self._file)).tell(failure, claim=lambda name: name)
        sys.exit(failure.exit_code)

    def warn(self, message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        """Replacement of ``warnings.showwarning``: says which rank warns."""
        text = warnings.formatwarning(message, category, filename, lineno, "")
        print(f"{self._name}: {text}", end="", file=sys.stderr, flush=True)  # noqa: T201


@contextlib.contextmanager
def running(env: ProcessEnv, environ: Mapping[str, str]) -> Iterator[Process]:
    """Run as a launched process of a job inside the block: an error that leaves it ends the process, reported once.

    A process that nobody started as one of several just runs the block.
    """
    file = Path(environ[ERROR_FILE]) if ERROR_FILE in environ else None
    channel = Channel.from_environment(environ)
    process = Process(env, file, repeats=env.rank != 0 or channel is not None)
    if env.launcher is None:
        yield process
        return
    if channel is not None:
        channel.enter(env.local_rank)
        if channel.stopping:  # asked between two attempts
            sys.exit(130)
        _end_with_launcher(channel)
    with warnings.catch_warnings():
        if env.rank != 0:
            warnings.showwarning = process.warn  # type: ignore[assignment]
        try:
            yield process
        except KeyboardInterrupt:
            sys.exit(130)
        except Exception as error:
            process.fail(error)


def _end_with_launcher(channel: Channel) -> None:
    """End this process when its launcher is gone, or wants its end because another process failed.

    The loop takes a SIGTERM for a request to save and stop, which a main thread that waits for a dead rank never gets
    to. Python notes a signal in this file at once, whatever the main thread does.
    """
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            ready, _, _ = select.select([reading], [], [], 1.0)
            if ready and signal.SIGTERM in os.read(reading, 64) and not channel.stopping:
                threading.Event().wait(_LAST_SECONDS)
                break
        os._exit(ENDED)

    threading.Thread(target=watch, name="d9d-launcher-watch", daemon=True).start()

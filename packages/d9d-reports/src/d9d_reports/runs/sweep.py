"""Sweep: runs of a grid as processes of ``d9d train``, several at a time."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Literal

from d9d_core.interpreter import python_command
from d9d_engine.launch.agent import signals_received
from d9d_engine.run.interrupt import STOPPED
from d9d_weights.files.atomic import write_json

from d9d_reports.runs.grid import SweepRun
from d9d_reports.runs.record import FAILURES, read_failures

_PAUSE = 0.1
_LINUX_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG

Ending = Literal["finished", "skipped", "failed", "interrupted", "not started"]


@dataclass
class Sweep:
    """Runs the unfinished runs of a grid.

    A run's output is appended to ``<directory>/<name>.log``. Each run is a separate process group, which is killed when
    the run ends.

    Attributes:
        runs: combinations of the grid.
        command: arguments of ``d9d`` for each run, before its overrides.
        options: arguments after the overrides.
        jobs: number of concurrent runs.
        say: function that prints a line.
        endings: name of a run -> its ending so far.
        errors: name of a failed run -> first line of its error.
    """

    runs: Sequence[SweepRun]
    command: Sequence[str]
    options: Sequence[str]
    jobs: int
    say: Callable[[str], None]
    endings: dict[str, Ending] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def run(self) -> bool:
        """Run all unfinished runs; return whether the sweep was interrupted.

        At the first SIGINT or SIGTERM, active runs save and end, and no further runs start; a second signal kills
        active runs.

        Raises:
            JobError: a run's directory belongs to another job. In this case, no run has been started.
        """
        finished = [run.is_finished() for run in self.runs]
        self.endings = {
            run.name: "skipped" if done else "not started" for run, done in zip(self.runs, finished, strict=True)
        }
        waiting = deque(run for run, done in zip(self.runs, finished, strict=True) if not done)
        active: list[_Active] = []
        told = 0
        with signals_received() as signals:
            try:
                while waiting or active:
                    if len(signals) > told:
                        waiting.clear()
                        for one in active:
                            one.stop(at_once=told > 0)
                        told = len(signals)
                    while waiting and len(active) < self.jobs:
                        active.append(self._start(waiting.popleft()))
                        self.say(f"{active[-1].run.name}: started, output in {active[-1].log}")
                    for one in [one for one in active if one.process.poll() is not None]:
                        active.remove(one)
                        self._ended(one, interrupted=told > 0)
                    time.sleep(_PAUSE)
            finally:
                for one in active:
                    one.end()
        return told > 0

    def _start(self, run: SweepRun) -> _Active:
        log = run.directory.parent / f"{run.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        overrides = [word for override in run.overrides for word in ("--set", override)]
        arguments = [*python_command(), "-m", "d9d_core", *self.command, *overrides, *self.options]
        environ = dict(os.environ)
        if self.jobs > 1 and "--nproc" not in self.options:
            environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // self.jobs)))
        output = log.open("ab")
        offset = output.tell()  # before the start, as the process moves the shared position
        process = subprocess.Popen(  # noqa: S603 - arguments come from d9d and the user
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ,
            start_new_session=True,
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - this process has no other threads
        )
        return _Active(run, process, output, offset, log)

    def _ended(self, one: _Active, interrupted: bool) -> None:
        one.end()
        name, code = one.run.name, one.process.returncode
        text = one.text()
        if code == 0 and any(line.startswith("finished ") for line in text.splitlines()[-3:]):
            self.endings[name] = "finished"
        elif interrupted or code in (0, STOPPED):
            self.endings[name] = "interrupted"
        else:
            self.endings[name] = "failed"
            self.errors[name] = error_of(text, code)
        directory = one.run.directory.parent
        failures = {other: error for other, error in read_failures(directory).items() if other != name}
        write_json(directory / FAILURES, failures | ({name: self.errors[name]} if name in self.errors else {}))
        self.say(f"{name}: {self.endings[name]}" + (f": {self.errors[name]}" if name in self.errors else ""))


@dataclass
class _Active:
    """Run in progress.

    Attributes:
        run: run of the grid.
        process: ``d9d train``, the leader of its process group.
        output: opened log.
        offset: length of the log before this start.
        log: path of the log.
    """

    run: SweepRun
    process: subprocess.Popen[bytes]
    output: IO[bytes]
    offset: int
    log: Path

    def stop(self, at_once: bool) -> None:
        """Ask the run to save and end, or kill the run."""
        with suppress(ProcessLookupError):
            if at_once:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill the processes of the run's process group that are still alive."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()

    def text(self) -> str:
        """Output of this start of the run."""
        with self.log.open("rb") as file:
            file.seek(self.offset)
            return file.read().decode(errors="replace")


def error_of(text: str, code: int) -> str:
    """Error of a failed run in one line: the signal that killed the run, d9d's error, or the last line of a traceback.

    The line gives the exit status if the output has neither an error nor a traceback.

    Args:
        text: output of the run.
        code: exit status; minus the signal's number if a signal killed the run.
    """
    if code < 0:
        names = {int(one): one.name for one in signal.Signals}
        hint = "; the system does that when memory runs out" if -code == signal.SIGKILL else ""
        return f"killed by {names.get(-code, f'signal {-code}')}{hint}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if said or any(line.startswith("Traceback ") for line in lines):
        return said[0] if said else lines[-1]
    return f"ended with exit status {code}"


def _end_with_parent() -> None:
    """Make the kernel send SIGTERM to this process when its parent ends, so that the run saves and ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_LINUX_DEATH_SIGNAL, int(signal.SIGTERM))

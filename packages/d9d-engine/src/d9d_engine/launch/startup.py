"""Phases of a start-up: wall and CPU seconds of each phase until the end of the first step. Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

from d9d_core import events as ev
from d9d_weights.files.atomic import write_text

#: File in the run's directory about its last start: command line, seconds of each phase, and environment.
FILE = "startup.json"
#: Phase whose line is printed together with the next phase's line, so that an invalid job prints its error only.
_BEFORE_JOB = "plugins"
#: Phases that show their own bars and lines on a terminal.
_OWN_BARS = ("data", "weights", "trainer", "first step", "progress", "first pack")
#: Seconds that a phase must last to be named in a printed line.
_TOLD = 1.0
#: Phase -> text of the live line.
_DOING = {
    "job": "reading the job",
    "torch": "importing torch",
    "modules": "importing modules",
    "processes": "connecting the processes",
    "plan": "planning the model",
    "optimizer": "building the optimizer",
}
#: Event -> the phase that it ends, and the following phase.
_ENDS: Mapping[type[Any], tuple[str, str]] = {
    ev.ModelPlanned: ("plan", "data"),
    ev.DataReady: ("data", "weights"),
    ev.ModelReady: ("weights", "optimizer"),
    ev.OptimizerReady: ("optimizer", "trainer"),
    ev.TrainingStarts: ("trainer", "first step"),
    ev.InferenceStarts: ("progress", "first pack"),
}


@dataclass(frozen=True, slots=True)
class Phase:
    """Phase of a start-up in this process.

    Attributes:
        name: name of the phase.
        wall: elapsed seconds.
        cpu: seconds of CPU time, over all threads.
    """

    name: str
    wall: float
    cpu: float


class StartUp:
    """Clock of a start-up, and a subscriber that ends its phases.

    On the terminal of a single process a phase of more than a second is a live line; otherwise it is printed when it
    ends. The first step, or the first batch of inference, ends the start-up: a line with the phases of at least a
    second is printed, and the seconds of all phases are written to the run's directory.

    Args:
        say: prints a line.
        shown: whether this process prints lines and writes the file; true for one process of a run.
        processes: number of processes of the run.
        command: command line that started the run; empty if unknown.
    """

    def __init__(self, say: Callable[[str], None], shown: bool, processes: int = 1, command: str = "") -> None:
        self.phases: list[Phase] = []
        self._say = say
        self._shown = shown
        self._processes = processes
        self._command = command
        self._directory: Path | None = None
        # One of several processes is killed if its start-up is interrupted, and would leave the terminal without a
        # cursor.
        self._terminal = shown and processes == 1 and sys.stderr.isatty()
        self._live = ExitStack()
        self._wall, self._cpu = time.monotonic() - _age(), 0.0
        self._over = False
        self._unsaid: list[str] = []

    def ends(self, name: str, following: str | None = None) -> None:
        """End the phase that began when the previous phase ended; optionally show the following phase."""
        wall, cpu = time.monotonic(), time.process_time()
        phase = Phase(name, wall - self._wall, cpu - self._cpu)
        self.phases.append(phase)
        self._wall, self._cpu = wall, cpu
        self._live.close()
        if self._shown and not self._terminal and not self._over and phase.wall >= _TOLD:
            self._unsaid.append(f"start-up: {name} {phase.wall:.1f} s")
            while self._unsaid and name != _BEFORE_JOB:
                self._say(self._unsaid.pop(0))
        if following is not None and self._terminal and following not in _OWN_BARS:
            self._show(following)

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Subscriptions to the events that end phases."""
        yield ev.JobConfigured, self._configured
        for event in _ENDS:
            yield event, self._ended
        yield ev.StepEnds, lambda _event: self._finish("first step")
        yield ev.PackEnds, lambda _event: self._finish("first pack")

    def __enter__(self) -> StartUp:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.close()

    def _configured(self, event: ev.JobConfigured) -> None:
        self._directory = event.job.run.directory

    def _ended(self, event: object) -> None:
        self.ends(*_ENDS[type(event)])

    def _finish(self, name: str) -> None:
        if self._over:
            return
        self._over = True
        self.ends(name)
        if not self._shown:
            return
        wall, cpu = sum(phase.wall for phase in self.phases), sum(phase.cpu for phase in self.phases)
        parts = ", ".join(f"{phase.name} {phase.wall:.1f}" for phase in self.phases if phase.wall >= _TOLD)
        self._say(f"ready after {wall:.1f} s" + (f": {parts}" if parts else ""))
        if self._directory is not None:
            seconds = {"wall": wall, "cpu": cpu, "phases": [*map(asdict, self.phases)]}
            about = {"command": self._command, "processes": self._processes}
            record = {**about, **seconds, "environment": environment()}
            with suppress(OSError):  # a full disk must not end the run
                write_text(self._directory / FILE, json.dumps(record, indent=1) + "\n")

    def _show(self, name: str) -> None:
        from d9d_weights.progress import waiting

        self._live.enter_context(waiting(f"start-up: {_DOING.get(name, name)}"))


def environment() -> dict[str, str]:
    """Versions of Python, torch and d9d, the system, and the GPU if CUDA is in use."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in ("torch", "d9d-core", "d9d-engine", "d9d-weights"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    torch = sys.modules.get("torch")  # do not import torch or initialise CUDA for this
    if torch is not None and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _age() -> float:
    """Seconds since this process began; if the system does not tell, the CPU time of this process."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()

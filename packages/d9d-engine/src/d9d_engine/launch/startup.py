"""Phases of a start: wall and CPU seconds of everything before the end of the first step. Imports no torch."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from d9d_core import events as ev
from d9d_weights.files.atomic import write_text

if TYPE_CHECKING:
    from rich.progress import Progress

#: File in the run's directory with the seconds of the last start.
FILE = "startup.json"
#: Phase whose line waits for the next one's: a wrong job prints its error and nothing else.
_BEFORE_JOB = "plugins"
#: Phases with bars and lines of their own on a terminal.
_OWN_BARS = ("data", "weights", "trainer", "first step", "progress", "first pack")
#: Event -> the phase that it ends, and the one that follows.
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
    """Phase of a start in this process.

    Attributes:
        name: what was done.
        wall: seconds that passed.
        cpu: seconds of CPU time of all threads.
    """

    name: str
    wall: float
    cpu: float


class StartUp:
    """Clock of a start, and a subscriber that ends its phases.

    On the terminal of one process the current phase is a live line; elsewhere each one is a line when it is done. The
    first step, or pack of inference, ends the start: one line tells the sum, and the run's directory gets the seconds.

    Args:
        say: prints a line.
        shown: false for all but one of several processes, and for those the file is not written.
        processes: number of processes of the run.
    """

    def __init__(self, say: Callable[[str], None], shown: bool, processes: int = 1) -> None:
        self.phases: list[Phase] = []
        self._say = say
        self._shown = shown
        self._processes = processes
        self._directory: Path | None = None
        # A process among others is killed when its start is interrupted, and would leave the terminal without a cursor.
        self._terminal = shown and processes == 1 and sys.stderr.isatty()
        self._live: Progress | None = None
        self._wall, self._cpu = time.monotonic() - _age(), 0.0
        self._over = False
        self._unsaid: list[str] = []

    def ends(self, name: str, following: str | None = None) -> None:
        """End a phase: what has passed since the end of the one before is its time. Another one may follow at once."""
        wall, cpu = time.monotonic(), time.process_time()
        phase = Phase(name, wall - self._wall, cpu - self._cpu)
        self.phases.append(phase)
        self._wall, self._cpu = wall, cpu
        self._hide()
        if self._shown and not self._terminal and not self._over:
            self._unsaid.append(f"start-up: {name} {phase.wall:.1f} s")
            while self._unsaid and name != _BEFORE_JOB:
                self._say(self._unsaid.pop(0))
        if following is not None and self._terminal and following not in _OWN_BARS:
            self._show(following)

    def subscriptions(self) -> Iterable[tuple[type[Any], Callable[[Any], None]]]:
        """Events that end phases."""
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
        self._hide()

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
        parts = ", ".join(f"{phase.name} {phase.wall:.1f}" for phase in self.phases)
        self._say(f"ready after {wall:.1f} s: {parts}")
        if self._directory is not None:
            seconds = {"wall": wall, "cpu": cpu, "phases": [*map(asdict, self.phases)]}
            record = {"processes": self._processes, **seconds, "environment": environment()}
            with suppress(OSError):  # a full disk ends no run
                write_text(self._directory / FILE, json.dumps(record, indent=1) + "\n")

    def _show(self, name: str) -> None:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        columns = (SpinnerColumn(), TextColumn("start-up: {task.description}"), TimeElapsedColumn())
        own_lines = sys.stdout.isatty()  # lines for a file must not end up in the terminal
        self._live = Progress(*columns, console=Console(stderr=True), transient=True, redirect_stdout=own_lines)
        self._live.add_task(name, total=None)
        self._live.start()

    def _hide(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def environment() -> dict[str, str]:
    """Versions of Python, of torch and of d9d, the system and the GPU, as far as this process knows them."""
    found = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    for package in ("torch", "d9d-core", "d9d-engine", "d9d-weights"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    torch = sys.modules.get("torch")  # it is not imported for this, nor is a GPU that is not in use touched
    if torch is not None and torch.cuda.is_initialized():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _age() -> float:
    """Seconds since this process began; where the system does not tell, those that it has computed."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()

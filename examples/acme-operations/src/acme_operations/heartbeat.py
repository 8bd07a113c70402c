"""Subscriber ``heartbeat``: an external watchdog reads the file's time to find runs that hang."""

from __future__ import annotations

import json
import time
from pathlib import Path

from d9d_core.events import ForwardReady, JobConfigured, StepEnds, TrainingStarts
from d9d_core.subscriber import Subscribes, subscribe

from acme_operations.config import HeartbeatConfig


class Heartbeat(Subscribes):
    """Writes ``{"step": number of finished steps, "time": seconds since 1970}``, on rank 0.

    The file is replaced in one operation, so that a reader never sees half of it.
    """

    def __init__(self, config: HeartbeatConfig) -> None:
        self._config = config
        self._path = Path(config.path)
        self._writes = True

    @subscribe(JobConfigured)
    def place(self, event: JobConfigured) -> None:
        """Put the file into the run's directory."""
        self._path = event.job.run.directory / self._config.path

    @subscribe(ForwardReady)
    def choose(self, event: ForwardReady) -> None:
        """Let only rank 0 write."""
        self._writes = event.topology.rank == 0

    @subscribe(TrainingStarts)
    def start(self, event: TrainingStarts) -> None:
        """Write before the first step, which may take minutes to compile."""
        self._beat(event.step)

    @subscribe(StepEnds)
    def end(self, event: StepEnds) -> None:
        """Write after every ``every``-th step."""
        if (event.step + 1) % self._config.every == 0:
            self._beat(event.step + 1)

    def _beat(self, steps: int) -> None:
        if not self._writes:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        new = self._path.with_name(f"{self._path.name}.new")
        new.write_text(json.dumps({"step": steps, "time": time.time()}))
        new.replace(self._path)

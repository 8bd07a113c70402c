"""Steps of a run that elastic replicas share: attempts, and the state that a replica takes over from another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from d9d_core import events as ev
from d9d_core.elastic import Attempt
from d9d_core.types import Pack, State

from d9d_engine.step.elastic import SharedStep, UndoneError

if TYPE_CHECKING:
    from torch import Tensor

    from d9d_engine.run.open_run import OpenRun


class LiveRun:
    """State of an open run (:class:`d9d_core.elastic.LiveState`) before its next step.

    Args:
        run: open run, between two steps.
        position: position in the data before the pack of the next step.
    """

    def __init__(self, run: OpenRun, position: State) -> None:
        self._run = run
        self._position = position

    def tensors(self) -> Mapping[str, Tensor]:
        """Local tensors of this rank; see :class:`~d9d_core.elastic.LiveState`."""
        return self._run.parts.checkpointer.live_tensors()

    def values(self) -> State:
        """JSON values of the run; waits for the values of earlier steps."""
        self._run.settle_counters()
        progress = self._run.progress
        return {
            **self._run.parts.checkpointer.values(progress),
            "step": progress.step,
            "data": self._position,
            "job": self._run.parts.checkpointer.job_values(),
        }

    def stops(self) -> bool:
        """Whether this process was asked to stop."""
        return self._run.parts.interrupts.requested is not None

    def take(self, values: State, tensors: Mapping[str, Tensor]) -> None:
        """Continue from another replica's state; see :class:`~d9d_core.elastic.LiveState`."""
        self._run.continue_from(self._run.parts.checkpointer.take_live(values, tensors))


class Attempts:
    """Makes steps that elastic replicas share, each with as many attempts as it takes.

    Args:
        shared: sums over the replicas.
        run: open run.
        note: prints a line.

    Attributes:
        replicas: number of replicas of the last attempt.
    """

    def __init__(self, shared: SharedStep, run: OpenRun, note: Callable[[str], None]) -> None:
        self._shared = shared
        self._run = run
        self._note = note
        self._last: tuple[str, ...] = ()
        self.replicas = 1

    def step(self) -> ev.StepResult | None:
        """Make the next step; if a replica is lost, repeat the step with the remaining ones and the same microbatches.

        Collective over all ranks. ``None`` if this replica was asked to stop before the step was done.
        """
        parts, progress = self._run.parts, self._run.progress
        pack: Pack | None = None
        position = self._position()
        while True:
            attempt = self._shared.replicas.meet(progress.step, LiveRun(self._run, position))
            if attempt is None:
                return None
            parts.topology.watchdog.phase("step", progress.step)
            if attempt.source is not None:
                pack, position = None, self._position()
            self._tell(attempt, progress.step)
            parts.events.emit(ev.AttemptStarts(progress.step, attempt))
            pack = self._pack() if pack is None else pack
            try:
                return parts.step(progress.step, pack, attempt)
            except UndoneError:
                self._note(f"step {progress.step + 1}: a replica was lost; the step is repeated")

    def _position(self) -> State:
        # A copy: once a pack is taken, the position before it is still needed by other replicas.
        return copy.deepcopy(self._run.parts.prefetcher.state())

    def _pack(self) -> Pack:
        with self._run.parts.profiler.ranges("data wait"):
            return self._run.parts.prefetcher.next()

    def _tell(self, attempt: Attempt, step: int) -> None:
        self.replicas = attempt.count
        if attempt.source is not None:
            self._note(f"took the state of replica {attempt.source} after step {step}")
        if attempt.replicas != self._last:
            self._last = attempt.replicas
            names = ", ".join(attempt.replicas)
            self._note(f"step {step + 1}: {attempt.count} replica{'s' * (attempt.count > 1)} share the batch: {names}")

"""Steps of a run that elastic replicas share: attempts, and the state that a replica takes over from another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from d9d_core import events as ev
from d9d_core.elastic import Attempt
from d9d_core.types import Pack, State
from torch import Tensor

from d9d_engine.distributed.mesh import Topology
from d9d_engine.profiling.ranges import Ranges
from d9d_engine.run.checkpointer import Checkpointer, Progress
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.step.elastic import SharedStep, UndoneError
from d9d_engine.step.step import TrainStep
from d9d_engine.subscribers.event_bus import Events


@dataclass(frozen=True)
class LiveRun:
    """State of an open run (:class:`d9d_core.elastic.LiveState`) before its next step.

    Attributes:
        checkpointer: reads and writes the tensors and values of the run's state.
        interrupts: stop requests.
        progress: counters of the run.
        position: position in the data before the pack of the next step.
        settle: waits for the values of earlier steps, such as losses, and updates the counters.
        resume: continues after the steps of another replica, whose counters it gets.
    """

    checkpointer: Checkpointer
    interrupts: Interrupts
    progress: Progress
    position: State
    settle: Callable[[], None]
    resume: Callable[[Progress], None]

    def tensors(self) -> Mapping[str, Tensor]:
        """Local tensors of this rank; see :class:`~d9d_core.elastic.LiveState`."""
        return self.checkpointer.live_tensors()

    def values(self) -> State:
        """JSON values of the run; waits for the values of earlier steps."""
        self.settle()
        job = self.checkpointer.job_values()
        return {
            **self.checkpointer.values(self.progress), "step": self.progress.step, "data": self.position, "job": job
        }  # fmt: skip

    def stops(self) -> bool:
        """Whether this process was asked to stop."""
        return self.interrupts.requested is not None

    def take(self, values: State, tensors: Mapping[str, Tensor]) -> None:
        """Continue from another replica's state; see :class:`~d9d_core.elastic.LiveState`."""
        self.resume(self.checkpointer.take_live(values, tensors))


class Attempts:
    """Makes the steps that elastic replicas (runs of one job) share; repeats a step during which a replica is lost.

    Args:
        shared: sums over the replicas.
        step: training step.
        topology: rank, device and time limits of this process.
        prefetcher: packs on the device.
        events: event bus of the subscribers.
        ranges: profiler ranges.
        live: makes the state before a step, from the position in the data.
        note: prints a line.

    Attributes:
        replicas: number of replicas of the last attempt.
    """

    def __init__(
        self,
        shared: SharedStep,
        step: TrainStep,
        topology: Topology,
        prefetcher: DevicePrefetcher,
        events: Events,
        ranges: Ranges,
        live: Callable[[State], LiveRun],
        note: Callable[[str], None],
    ) -> None:
        self._shared = shared
        self._step = step
        self._topology = topology
        self._prefetcher = prefetcher
        self._events = events
        self._ranges = ranges
        self._live = live
        self._note = note
        self._last: tuple[str, ...] = ()
        self.replicas = 1

    def step(self, progress: Progress) -> ev.StepResult | None:
        """Make the next step; if a replica is lost, the remaining replicas repeat it with the same microbatches.

        Collective over all ranks. ``None`` if this replica was asked to stop before the step was done.

        Args:
            progress: counters of the run; replaced by the counters of another replica if this replica takes its state.
        """
        pack: Pack | None = None
        position = self._position()
        while True:
            attempt = self._shared.replicas.meet(progress.step, self._live(position))
            if attempt is None:
                return None
            self._topology.watchdog.phase("step", progress.step)
            if attempt.source is not None:
                pack, position = None, self._position()
            self._tell(attempt, progress.step)
            self._events.emit(ev.AttemptStarts(progress.step, attempt))
            pack = self._pack() if pack is None else pack
            try:
                return self._step(progress.step, pack, attempt)
            except UndoneError:
                self._note(f"step {progress.step + 1}: a replica was lost; the step is repeated")

    def _position(self) -> State:
        # Copy the state: after a pack is taken, other replicas still need the position before it.
        return copy.deepcopy(self._prefetcher.state())

    def _pack(self) -> Pack:
        with self._ranges("data wait"):
            return self._prefetcher.next()

    def _tell(self, attempt: Attempt, step: int) -> None:
        self.replicas = attempt.count
        if attempt.source is not None:
            self._note(f"took the state of replica {attempt.source} after step {step}")
        if attempt.replicas != self._last:
            self._last = attempt.replicas
            names = ", ".join(attempt.replicas)
            verb = "replicas share" if attempt.count > 1 else "replica runs"
            self._note(f"step {step + 1}: {attempt.count} {verb} the batch: {names}")

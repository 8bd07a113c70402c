"""Open run of a trainer: steps, with the log entries, evaluations and checkpoints that are due."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from d9d_core import events as ev
from d9d_core.errors import CheckpointError, D9dError, NonFiniteError
from d9d_core.job_file.job import JobConfig
from d9d_core.subscriber import EndsTraining
from d9d_core.tracker import storable
from d9d_core.types import State
from torch import nn

from d9d_engine.distributed.mesh import Topology, describe_rank
from d9d_engine.profiling.profiler import StepProfiler
from d9d_engine.run.attempts import Attempts, LiveRun
from d9d_engine.run.checkpointer import Checkpointer, Progress
from d9d_engine.run.clock import Clock
from d9d_engine.run.evaluation import Evaluator
from d9d_engine.run.gc import PacedCollection
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.logbook import Logbook
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.run.progress import ProgressBar
from d9d_engine.sleep.sleeper import Sleeper
from d9d_engine.step.step import TrainStep
from d9d_engine.subscribers.event_bus import Events
from d9d_engine.supervision.compilation import CompilationLog
from d9d_engine.supervision.together import fail_together
from d9d_engine.trackers.hub import TrackerHub
from d9d_engine.trackers.run_log import HubLog

#: Function that exports the model; see :class:`d9d_engine.compose.export.Exporter`.
Export = Callable[
    [Progress, Literal["model", "adapter"] | None, Path | None, bool, Callable[[int, int], None]], list[Path]
]


@dataclass(frozen=True)
class Collaborators:
    """Objects that a trainer and its open run work with.

    Attributes:
        job: resolved job.
        topology: rank, device, meshes and process groups of this process.
        stage: this rank's model: the full model, or its pipeline stages as one module.
        step: training step.
        total_steps: number of steps of the run.
        prefetcher: prefetcher of packs to the device.
        trackers: destinations of logged values.
        log: log for values of tasks and subscribers.
        evaluator: evaluator; ``None`` without an evaluation section.
        checkpointer: saves and restores checkpoints.
        export: exports the trained model.
        interrupts: stop requests.
        events: event bus of the subscribers.
        note: prints a line.
        sleeper: releases device memory.
        profiler: profiles some steps.
        utilisation: tokens per second -> further values to log.
        ends: name -> subscriber that may end the run.
    """

    job: JobConfig
    topology: Topology
    stage: nn.Module
    step: TrainStep
    total_steps: int
    prefetcher: DevicePrefetcher
    trackers: TrackerHub
    log: HubLog
    evaluator: Evaluator | None
    checkpointer: Checkpointer
    export: Export
    interrupts: Interrupts
    events: Events
    note: Callable[[str], None]
    sleeper: Sleeper
    profiler: StepProfiler
    utilisation: Callable[[float], Mapping[str, float]]
    ends: Mapping[str, EndsTraining] = field(default_factory=dict)

    @property
    def reason_to_end(self) -> str | None:
        """Reason of the first subscriber that wants to end the run; the same on all ranks."""
        reasons = ((name, one.reason_to_end) for name, one in self.ends.items())
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)


class OpenRun:
    """State and actions of a run between its start and its end.

    Args:
        parts: objects that the trainer works with.
        progress: counters, updated by the run.
        shown: whether to show a progress bar.

    Attributes:
        owned: resources held until the end, such as the checkpoint directory.
        deferred: context that defers failures of subscribers until all ranks have finished the same step.
        bar: progress bar.
        clock: clock of the logged speed.
        collection: pacing of Python's garbage collection.
        compilation: log of compilations.
        evaluated: step of the last evaluation, and its values.
        busy: whether code of the trainer, not of its caller, is running.
    """

    def __init__(self, parts: Collaborators, progress: Progress, shown: bool) -> None:
        self.parts = parts
        self.progress = progress
        self.owned = ExitStack()
        self.deferred = ExitStack()
        self.bar = ProgressBar(parts.total_steps, progress.step, shown)
        self.clock = Clock()
        self.collection = PacedCollection(parts.job.garbage_collection.every)
        self.compilation = CompilationLog(parts.stage, parts.events.emit, parts.note, progress.step)
        self.busy = False
        self.evaluated: tuple[int, dict[str, float]] | None = None
        self._attempts = self._opened_attempts()
        self._logbook = self._opened_logbook()
        self._saved = progress.step or None  # the step of the last save
        self._retry: int | None = None  # step after which a failed save is repeated
        self._between_steps = True
        parts.log.follow(lambda: progress.step + (not self._between_steps))

    def begin(self) -> None:
        """Tell subscribers that training starts."""
        self.parts.events.failure = None  # if an earlier run failed, its failure was raised then
        self.deferred.enter_context(self.parts.events.deferring())
        self.parts.events.emit(ev.TrainingStarts(self.progress.step, self.parts.total_steps, self.parts.log))

    @property
    def stops(self) -> bool:
        """Whether any rank was asked to stop or failed; the ranks learn of it after the same step."""
        return self._logbook.stop

    @property
    def is_over(self) -> bool:
        """Whether the run has no further step."""
        return self.progress.step >= self.parts.total_steps or self.stops or self.parts.reason_to_end is not None

    def advance(self) -> ev.StepResult | None:
        """Make one step, with the log entry, evaluation and checkpoint that are due.

        Returns ``None`` if no step was made, because a run with elastic replicas was asked to stop.
        """
        job, parts, progress = self.parts.job, self.parts, self.progress
        parts.topology.watchdog.phase("step", progress.step)
        parts.profiler.before(progress.step)
        make = self._prepared()
        self._between_steps = False
        try:
            result = make()
        except Exception as error:
            if not isinstance(error, D9dError):  # a D9dError names its own place
                error.add_note(f"raised in step {progress.step + 1}")
            raise
        if result is None:
            self._logbook.stop = self._between_steps = True
            return None
        progress.step += 1
        self._between_steps = True
        self.compilation.after(progress.step)
        self._record(result)
        self._announce()
        at_end = progress.step == parts.total_steps
        if parts.evaluator and job.evaluation and (at_end or progress.step % job.evaluation.every == 0):
            self.evaluate()
        due = job.checkpoint.every and progress.step % job.checkpoint.every == 0
        if (due or progress.step == self._retry) and not at_end and parts.reason_to_end is None:
            with self.clock.paused():
                if self._save():
                    self._retry = None
                else:  # counted in steps, which are equal on all ranks, unlike clocks
                    self._retry = progress.step + 2 ** (parts.checkpointer.store.failures - 1)
        self.collection.after_step(progress.step)
        parts.profiler.after(progress.step)
        return result

    def settle_counters(self) -> None:
        """Read the values of all steps so far, and update the counters."""
        self._logbook.drain()
        self.parts.log.drain()
        self.progress.skips, self.progress.tokens = self._logbook.skips, self._logbook.tokens

    def continue_from(self, progress: Progress) -> None:
        """Continue after the steps of another replica, whose state this run has taken."""
        self._logbook.drain()
        own = self.progress  # the life cycle holds the same object
        own.step, own.tokens, own.skips, own.logged = progress.step, progress.tokens, progress.skips, progress.logged
        own.trained_by, self._retry = None, None
        self._logbook = self._opened_logbook()
        self.clock.take()

    def evaluate(self) -> None:
        """Evaluate the current model and log the values."""
        assert self.parts.evaluator is not None
        self._logbook.drain()
        step = self.progress.step
        with self.clock.paused(), self.parts.profiler.ranges("evaluation"), self.bar.doing("evaluating"):
            self.parts.checkpointer.make_replicas_equal()
            self.parts.events.emit(ev.EvaluationStarts(step))
            with self.parts.step.evaluation_weights():
                values = self.parts.evaluator.run(lambda tables: self.parts.trackers.write_tables(step, tables))
            if wrong := ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)):
                self.parts.note(f"warning: the evaluation after step {step} is not finite: {wrong}")
            self._write(step, values)
            self.evaluated = (step, values)
            self.compilation.after(step)
            self.collection.after_pause()
            self.parts.events.emit(ev.EvaluationEnds(step, values))

    def save(self) -> None:
        """Save the current step if necessary, and wait until its checkpoint is written."""
        self._logbook.drain()
        if self._saved != self.progress.step:
            self._save(wait=True)
        self.settle_writes()

    def settle_writes(self) -> None:
        """Wait for pending copies of logged values and for a running save."""
        self._logbook.drain()
        self.parts.topology.watchdog.phase("checkpoint", self.progress.step)
        with self.bar.doing("saving"):
            self.parts.checkpointer.wait()
        self._announce()

    def export(self, kind: Literal["model", "adapter"] | None = None, directory: Path | None = None) -> list[Path]:
        """Export the model with its evaluation weights; see :class:`d9d_engine.compose.export.Exporter`."""
        return self._export(self.progress, kind, directory, False)

    def fail_together(self, action: Callable[[], object]) -> None:
        """Run a function on every rank; a failure on one rank fails the run on all. Collective over all ranks."""
        topology = self.parts.topology
        who = topology.watchdog.who or describe_rank(topology.sizes, topology.rank)
        fail_together(action, who, self.parts.checkpointer.store.group)

    def _raise_deferred(self) -> None:
        if self.parts.events.failure is not None:
            raise self.parts.events.failure

    def settle(self) -> Literal["finished", "stopped"]:
        """Save the last step; export the model if all steps are done or a subscriber ended the run."""
        step, total, reason = self.progress.step, self.parts.total_steps, self.parts.reason_to_end
        self._logbook.drain()
        if step or reason is not None:  # otherwise there is nothing to save
            self.save()
        self.fail_together(self._raise_deferred)
        if step < total and not self._logbook.stop and reason is not None:
            self.parts.note(f"ended after step {step} of {total} and saved: {reason}")
        elif step < total:
            asked = self.parts.interrupts.requested or ("another rank" if self._logbook.stop else None)
            done = f"stopped after step {step} of {total} and saved; start again to continue"
            done = done if step else "stopped before the first step; nothing was trained"
            self.parts.note(done if asked is None else f"{asked}: {done}")
            return "stopped"
        if last := self.progress.skips.in_a_row:
            self.parts.note(
                f"warning: the last {last} of {step} steps were skipped, as their losses or gradients were not finite; "
                f"the exported model may be useless. The checkpoint before step {self.progress.skips.began} is kept"
            )
        self.parts.step.task.finalize()
        # The files of a finished run describe how its weights were trained: a start that trains nothing keeps them.
        keep = self.parts.checkpointer.has_ended
        if self.parts.job.export == "best":
            with self.parts.checkpointer.best_weights(self.progress) as progress:
                self._export(progress, None, None, keep)
        else:
            self._export(self.progress, None, None, keep)
        return "finished"

    def rescue(self, error: Exception) -> None:
        """Save the state after an error between steps, if this process is the only rank and the state is valid."""
        # Other ranks cannot take part in a save: they wait for this rank in the middle of a step.
        alone = self.parts.topology.world_size == 1
        if isinstance(error, NonFiniteError | CheckpointError) or not (alone and self._between_steps):
            return
        if self._saved == self.progress.step or not self.progress.step:
            return
        try:
            self.parts.sleeper.wake(self.parts.sleeper.asleep)
            self._save(wait=True)
        except Exception as second:
            error.add_note(f"in addition, saving failed after step {self.progress.step}: {second!r}")
        else:
            self.parts.note(f"saved after step {self.progress.step}, before this error: {type(error).__name__}")

    def _export(
        self, progress: Progress, kind: Literal["model", "adapter"] | None, directory: Path | None, keep: bool
    ) -> list[Path]:
        self.parts.checkpointer.make_replicas_equal()
        with self.parts.step.evaluation_weights(), self.bar.doing("exporting"):
            return self.parts.export(progress, kind, directory, keep, partial(self.bar.told, "exporting"))

    def _prepared(self) -> Callable[[], ev.StepResult | None]:
        """Return the function that makes the next step; fetch its microbatches, unless elastic replicas share steps."""
        if self._attempts is not None:
            return partial(self._attempts.step, self.progress)
        with self.parts.profiler.ranges("data wait"):
            pack = self.parts.prefetcher.next()
        return partial(self.parts.step, self.progress.step, pack)

    def _opened_attempts(self) -> Attempts | None:
        parts = self.parts
        if parts.step.shared is None:
            return None

        def live(position: State) -> LiveRun:
            state = (parts.checkpointer, parts.interrupts, self.progress, position)
            return LiveRun(*state, self.settle_counters, self.continue_from)

        data = (parts.prefetcher, parts.events, parts.profiler.ranges)
        return Attempts(parts.step.shared, parts.step, parts.topology, *data, live, parts.note)

    def _opened_logbook(self) -> Logbook:
        parts, progress, attempts = self.parts, self.progress, self._attempts
        # The logged rate has the tokens of all replicas; MFU is computed from the rate of this replica's devices.
        of_replica = parts.utilisation if attempts is None else lambda rate: parts.utilisation(rate / attempts.replicas)
        return Logbook(
            self._write,
            self.bar.update,
            parts.job.nonfinite,
            progress.skips,
            parts.job.max_skipped,
            progress.tokens,
            parts.trackers.write_tables,
            of_replica,
            parts.job.logging.max_pending,
        )

    def _record(self, result: ev.StepResult) -> None:
        progress, statistics = self.progress, self.parts.step.statistics
        lr = self.parts.step.optimizer.lr
        self.bar.issued(progress.step, lr)
        due = progress.step % self.parts.job.logging.every == 0 or progress.step == 1
        if not due and progress.step < self.parts.total_steps:
            self._logbook.record(progress.step, result, None)
        else:
            values = statistics.compute()
            self._logbook.record(progress.step, result, {"lr": lr}, values, self.clock.take(), statistics.beside)
        self.parts.log.deliver()
        progress.skips, progress.tokens = self._logbook.skips, self._logbook.tokens
        if due:  # otherwise this is the last step, within a period, which continues if the run is prolonged
            statistics.reset()

    def _save(self, wait: bool = False) -> bool:
        progress = self.progress
        self.settle_counters()  # a checkpoint must not contain a step that may not be finite
        self.parts.topology.watchdog.phase("checkpoint", progress.step)
        self.parts.events.emit(ev.CheckpointStarts(progress.step))
        with self.parts.profiler.ranges("checkpoint"), self.bar.doing("saving"):
            saved = self.parts.checkpointer.save(progress, wait, partial(self.bar.told, "saving"))
        self._saved = progress.step if saved else self._saved
        self.collection.after_pause()
        self._announce()
        return saved

    def _announce(self) -> None:
        """Report the checkpoints written since the last call."""
        for report in self.parts.checkpointer.poll():
            self.bar.saved(report.step)
            self.parts.note(
                f"checkpoint at step {report.step}: {report.bytes / 2**20:,.1f} MiB written in "
                f"{report.write_seconds:.2f} s, training waited {report.stall_seconds:.2f} s"
            )
            self.parts.events.emit(ev.CheckpointSaved(report))

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self.bar.logged(values)
        # Trackers get the original names, and report unsupported ones; a checkpoint stores valid text only.
        self.parts.trackers.write(step, values)
        values = {storable(name): value for name, value in values.items()}
        self.progress.logged.update(values)
        self.parts.events.emit(ev.ValuesLogged(step, values))

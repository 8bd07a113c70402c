"""Trainer: the loop around the step, which resumes, logs, evaluates, saves and stops."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from d9d_core import events as ev
from d9d_core.config.job import JobConfig
from d9d_core.errors import CheckpointError, NonFiniteError
from d9d_core.failures import ended_by, exits_are_errors, source_of
from d9d_core.protocols.subscriber import EndsTraining
from d9d_core.protocols.tracker import RunInfo
from torch import nn

from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.checkpointer import Checkpointer, Progress
from d9d_engine.run.evaluation import Evaluator
from d9d_engine.run.gc import built_objects_spared
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.logbook import MAX_PENDING, Logbook
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.run.progress import ProgressBar
from d9d_engine.step.randomness import generators_kept
from d9d_engine.step.step import TrainStep
from d9d_engine.trackers.hub import TrackerHub
from d9d_engine.trackers.run_log import HubLog


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        status: all steps done, or interrupted and saved.
        step: optimizer steps done.
    """

    status: Literal["finished", "stopped"]
    step: int


class Trainer:
    """Trainer of a built job. Its collaborators are public, so that they can be used alone.

    Made by :func:`d9d_engine.build.compose.build`.

    Args:
        job: the resolved job.
        topology: this process among others.
        model: the model, or this rank's stages of it.
        step: one training step.
        total_steps: how many steps the whole run has.
        prefetcher: packs on the device.
        trackers: where logged values go.
        evaluator: measures the loss on other data.
        checkpointer: checkpoints.
        export: writes the trained model; its card says how far the run is.
        interrupts: whether this process was asked to stop.
        events: observers.
        note: prints a line.
        ends: subscribers that may end the run, by name.
    """

    def __init__(
        self,
        job: JobConfig,
        topology: Topology,
        model: nn.Module,
        step: TrainStep,
        total_steps: int,
        prefetcher: DevicePrefetcher,
        trackers: TrackerHub,
        evaluator: Evaluator | None,
        checkpointer: Checkpointer,
        export: Callable[[Progress], None] | None,
        interrupts: Interrupts,
        events: ev.Events,
        note: Callable[[str], None],
        ends: Mapping[str, EndsTraining] | None = None,
    ) -> None:
        self.job = job
        self.topology = topology
        self._model = model
        self.step = step
        self.total_steps = total_steps
        self.prefetcher = prefetcher
        self.trackers = trackers
        self.evaluator = evaluator
        self.checkpointer = checkpointer
        self.progress = Progress()
        self.export = None if export is None else lambda: export(self.progress)
        self.interrupts = interrupts
        self.events = events
        self.note = note
        self._ends = dict(ends or {})
        self._saved: int | None = None  # the step of the last save
        self._between_steps = True
        lag = 0 if topology.device.type == "cpu" else MAX_PENDING
        self.log = HubLog(trackers, lambda: self.progress.step + (not self._between_steps), lag)

    @property
    def stage(self) -> nn.Module:
        """Model as this rank holds it: all of it, or its pipeline stages as one module."""
        return self._model

    def train(self) -> Outcome:
        """Train until all steps are done or an interrupt arrives, from the newest checkpoint if there is one.

        Ctrl-C and SIGTERM, on any rank, let all ranks finish the same step, save, and return. Collective over all
        ranks.

        Raises:
            NonFiniteError: a loss or gradient was not finite and the policy is ``error``.
            CheckpointError: a checkpoint could not be read or written.
            TrainingError: a plugin wanted to end the process; what is sound is saved.
        """
        try:
            with (
                exits_are_errors(),
                self.checkpointer.store.opened(),
                generators_kept(self.topology.device),
                built_objects_spared(),
            ):
                outcome = self._train()
        except BaseException:
            with suppress(Exception):  # the first error counts
                self.prefetcher.load_state(self.prefetcher.state())
            raise
        self.prefetcher.load_state(self.prefetcher.state())  # ends its thread; packs fetched ahead are fetched again
        return outcome

    def _train(self) -> Outcome:
        self.progress, tracker_states = self.checkpointer.restore()
        progress = self.progress
        total = self.total_steps
        if progress.step >= total:
            self.note(f"nothing left to train: the checkpoint is at step {progress.step}, the job has {total} steps")
        elif reason := self._reason_to_end():
            self.note(f"nothing left to train: the run ended at step {progress.step} of {total}, {reason}")
        elif progress.step:
            self.note(f"resumed at step {progress.step} of {total}")
        self.checkpointer.record()
        self.trackers.open(self._run_info(progress.step), tracker_states)
        try:
            with self.interrupts, ProgressBar(total, progress.step, shown=self.topology.is_main) as bar:
                status = self._run_and_rescue(progress, bar)
                self.log.drain()
                self.trackers.close(status)
                done = ev.TrainingFinished if status == "finished" else ev.TrainingStopped
                self.events.emit(done(progress.step))
                if status == "finished":
                    self.checkpointer.record_end(progress.step, total, self._reason_to_end())
        except BaseException as error:
            with suppress(Exception):  # the device may be what failed
                self.log.drain()
            self.trackers.close("failed")
            try:
                self.events.emit(ev.TrainingFailed(progress.step, error))
            except Exception as second:
                error.add_note(f"besides, a subscriber to TrainingFailed raised {second!r}")
            raise
        return Outcome(status, progress.step)

    def _run_and_rescue(self, progress: Progress, bar: ProgressBar) -> Literal["finished", "stopped"]:
        """Run, and save what a plugin that fails leaves sound."""

        def write(step: int, values: Mapping[str, float]) -> None:
            bar.logged(values["tokens_per_second"])
            self._write(step, values)

        logbook = Logbook(
            write, bar.update, self.job.nonfinite, progress.skipped, progress.tokens, self.trackers.write_tables
        )
        self._saved = progress.step if progress.step else None
        try:
            with exits_are_errors(), self.events.deferring():
                return self._run(progress, bar, logbook)
        except KeyboardInterrupt as error:
            if self.interrupts.requested is not None or (source := source_of(error)) is None:
                raise
            self._rescue(failure := ended_by(source, error), progress, logbook)
            raise failure from error
        except Exception as error:
            self._rescue(error, progress, logbook)
            raise

    def _rescue(self, error: Exception, progress: Progress, logbook: Logbook) -> None:
        # Others cannot be asked: they wait for this rank in the middle of a step.
        alone = self.topology.world_size == 1
        if isinstance(error, NonFiniteError | CheckpointError) or not (alone and self._between_steps):
            return
        if self._saved == progress.step or not progress.step:
            return
        try:
            self._save(progress, logbook, wait=True)
        except Exception as second:
            error.add_note(f"besides, nothing could be saved after step {progress.step}: {second!r}")
        else:
            self.note(f"saved after step {progress.step}, for what follows: {type(error).__name__}")

    def _run(self, progress: Progress, bar: ProgressBar, logbook: Logbook) -> Literal["finished", "stopped"]:
        job, total = self.job, self.total_steps
        clock = _Clock()
        retry: int | None = None
        self.events.emit(ev.TrainingStarts(progress.step, total, self.log))
        reason = self._reason_to_end()
        while progress.step < total and not logbook.stop and reason is None:
            self.topology.watchdog.phase("step", progress.step)
            pack = self.prefetcher.next()
            self._between_steps = False
            result = self.step(progress.step, pack)
            progress.step += 1
            self._between_steps = True
            self._record(progress, result, logbook, clock, bar)
            self._announce()
            at_end = progress.step == total
            if self.evaluator and job.evaluation and (at_end or progress.step % job.evaluation.every == 0):
                logbook.drain()
                with clock.paused():
                    self._evaluate(progress.step)
            if reason := self._reason_to_end():
                break
            due = job.checkpoint.every and progress.step % job.checkpoint.every == 0
            if (due or progress.step == retry) and not at_end:
                logbook.drain()
                with clock.paused():
                    if self._save(progress, logbook):
                        retry = None
                    else:  # all ranks count alike, where their clocks would differ
                        retry = progress.step + 2 ** (self.checkpointer.store.failures - 1)
        logbook.drain()
        if self._saved != progress.step:
            self._save(progress, logbook, wait=True)
        self.topology.watchdog.phase("checkpoint", progress.step)
        self.checkpointer.wait()
        self._announce()
        if self.events.failure is not None:
            raise self.events.failure
        if reason is not None and progress.step < total:
            self.note(f"ended after step {progress.step} of {total} and saved: {reason}")
        elif logbook.stop and progress.step < total:
            done = f"stopped after step {progress.step} of {total} and saved"
            self.note(f"{self.interrupts.requested or 'another rank'}: {done}; start again to continue")
            return "stopped"
        if self.export is not None:
            self.export()
        return "finished"

    def _record(
        self, progress: Progress, result: ev.StepResult, logbook: Logbook, clock: _Clock, bar: ProgressBar
    ) -> None:
        lr = self.step.optimizer.lr
        bar.issued(progress.step, lr)
        due = progress.step % self.job.logging.every == 0 or progress.step == 1
        if not due and progress.step < self.total_steps:
            logbook.record(progress.step, result, None)
        else:
            logbook.record(progress.step, result, {"lr": lr}, self.step.statistics.compute(), clock.take())
        self.log.deliver()
        progress.skipped, progress.tokens = logbook.skipped, logbook.tokens
        if due:  # else the period goes on, should the run be prolonged
            self.step.statistics.reset()

    def _save(self, progress: Progress, logbook: Logbook, wait: bool = False) -> bool:
        logbook.drain()  # no checkpoint from a step whose finiteness is unread
        self.log.drain()
        progress.skipped, progress.tokens = logbook.skipped, logbook.tokens
        self.topology.watchdog.phase("checkpoint", progress.step)
        self.events.emit(ev.CheckpointStarts(progress.step))
        saved = self.checkpointer.save(progress, wait)
        self._saved = progress.step if saved else self._saved
        self._announce()
        return saved

    def _announce(self) -> None:
        """Report the checkpoints that exist by now."""
        for report in self.checkpointer.poll():
            self.note(
                f"checkpoint at step {report.step}: {report.bytes / 2**20:,.1f} MiB written in "
                f"{report.write_seconds:.2f} s, training waited {report.stall_seconds:.2f} s"
            )
            self.events.emit(ev.CheckpointSaved(report))

    def _evaluate(self, step: int) -> None:
        assert self.evaluator is not None
        self.events.emit(ev.EvaluationStarts(step))
        values = self.evaluator.run(lambda tables: self.trackers.write_tables(step, tables))
        if wrong := ", ".join(f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)):
            self.note(f"warning: the evaluation after step {step} found no number: {wrong}")
        self._write(step, values)
        self.events.emit(ev.EvaluationEnds(step, values))

    def _reason_to_end(self) -> str | None:
        """Reason of the first subscriber that has one; alike on all ranks."""
        reasons = ((name, one.reason_to_end) for name, one in self._ends.items())
        return next((f"{name}: {reason}" for name, reason in reasons if reason is not None), None)

    def _write(self, step: int, values: Mapping[str, float]) -> None:
        self.progress.logged.update(values)
        self.trackers.write(step, values)
        self.events.emit(ev.ValuesLogged(step, values))

    def _run_info(self, step: int) -> RunInfo:
        run = self.job.run
        return RunInfo(
            run.name,
            run.directory,
            run.description,
            self.job.resolved(),
            self.total_steps,
            step,
            run.hparams,
            tuple(run.tags),
        )


class _Clock:
    """Seconds between two log entries, on the host's clock, without evaluations and checkpoints."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def take(self) -> float:
        now = time.perf_counter()
        seconds, self._start = now - self._start, now
        return seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self._start += time.perf_counter() - before

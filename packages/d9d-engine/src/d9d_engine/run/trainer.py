"""Trainer: a run from its start to its end, at once or some steps at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from d9d_core import events as ev
from d9d_core.errors import BuildError, TrainingError
from d9d_core.job_file.job import JobConfig
from d9d_core.tracker import RunLog
from torch import nn

from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.checkpointer import Checkpointer, Progress
from d9d_engine.run.evaluation import Evaluator
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.life_cycle import LifeCycle, Outcome
from d9d_engine.run.open_run import Collaborators, OpenRun
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.sleep.sleeper import Tag
from d9d_engine.step.step import TrainStep
from d9d_engine.subscribers.event_bus import Events
from d9d_engine.trackers.hub import TrackerHub

__all__ = ["Trainer"]


class Trainer:
    """Trainer of a built job; trains all steps (:meth:`train`), or some steps at a time (:meth:`steps`).

    In a notebook, or in a custom loop::

        with job.build() as trainer:
            for result in trainer.steps(100):  # with the logging, evaluations and checkpoints of the job
                print(result.loss)  # waits for the device
            trainer.evaluate()
            trainer.export("draft")

    The end of the block saves and closes the run, like :meth:`finish`. The objects that the trainer works with are
    public, so that each can be used alone. Made by :func:`d9d_engine.compose.training.build`.

    Args:
        parts: objects that the trainer works with.
    """

    def __init__(self, parts: Collaborators) -> None:
        self._parts = parts
        self._life = LifeCycle(parts)
        parts.topology.watchdog.rest()  # no time limit before training starts

    @property
    def job(self) -> JobConfig:
        """Job, with all values resolved."""
        return self._parts.job

    @property
    def topology(self) -> Topology:
        """Topology of this process: rank, device, meshes and process groups."""
        return self._parts.topology

    @property
    def progress(self) -> Progress:
        """Counters of the run: steps, tokens and skipped steps."""
        return self._life.progress

    @property
    def stage(self) -> nn.Module:
        """This rank's model: the full model, or its pipeline stages as one module."""
        return self._parts.stage

    @property
    def step(self) -> TrainStep:
        """Training step, to be called with a step number and the step's microbatches."""
        return self._parts.step

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return self._parts.total_steps

    @property
    def prefetcher(self) -> DevicePrefetcher:
        """Prefetcher that copies the microbatches of coming steps to the device."""
        return self._parts.prefetcher

    @property
    def trackers(self) -> TrackerHub:
        """Trackers of the run."""
        return self._parts.trackers

    @property
    def log(self) -> RunLog:
        """Log for the caller's own values, which go to the trackers."""
        return self._parts.log

    @property
    def evaluator(self) -> Evaluator | None:
        """Evaluator; ``None`` if the job has no section ``evaluation``."""
        return self._parts.evaluator

    @property
    def checkpointer(self) -> Checkpointer:
        """Checkpointer of the run."""
        return self._parts.checkpointer

    @property
    def interrupts(self) -> Interrupts:
        """Stop requests of this process."""
        return self._parts.interrupts

    @property
    def events(self) -> Events:
        """Event bus of the subscribers."""
        return self._parts.events

    def train(self) -> Outcome:
        """Train from the newest checkpoint, if there is one, until the run is finished or an interrupt arrives.

        After Ctrl-C or SIGTERM on any rank, all ranks finish the same step, save, and return. Collective over all
        ranks.

        Raises:
            NonFiniteError: a loss or gradient was not finite and the policy is ``error``.
            CheckpointError: a checkpoint could not be read or written.
            TrainingError: a plugin tried to end the process (a run of one process saves valid state first), or memory
                is released by :meth:`sleep`.
        """
        self._check_awake("train")
        if opens := self._life.run is None:
            run = self._life.restored(shown=self.topology.is_main)
        else:
            run = self._between_steps("train")
            run.clock.go()
        with self.interrupts, run.bar:
            with self._life.guarded(run):
                if opens:
                    run.begin()
                while not run.is_over:
                    run.advance()
            return self._life.finish(run)

    def start(self) -> None:
        """Open the run from its newest checkpoint; no effect if it is open. Collective over all ranks.

        Other methods call this when needed.

        Raises:
            CheckpointError: a checkpoint could not be read.
        """
        self._check_awake("start")
        self._life.opened()

    def steps(self, count: int | None = None) -> Iterator[ev.StepResult]:
        """Train some steps, with the log entries, evaluations and checkpoints that are due. Collective over all ranks.

        The caller may run any code between steps; its time does not count for the logged speed.

        Args:
            count: largest number of steps; by default, all remaining steps.

        Yields:
            The result of each step, as device tensors. Fewer than ``count`` if the run ends before.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM arrived in a step. All ranks have finished the same step; the run is
                saved and closed, and the next call continues the run.
            TrainingError: the method was called inside a step, or memory is released by :meth:`sleep`.
            D9dError: see :meth:`train`.
        """
        run = self._between_steps("steps")
        if self.progress.step >= self.total_steps:
            self._parts.note(f"nothing left to train: all {self.total_steps} steps are done")
        done = 0
        while (count is None or done < count) and not run.is_over:
            self._check_awake("steps")  # the caller may have called sleep()
            with self.interrupts.kept(), self._life.called(run):
                result = run.advance()
            if result is None:
                break
            done += 1
            yield result
            if run is not self._life.run:
                return  # the caller has finished the run
        if run.stops:
            asked = self.interrupts.requested or "another rank"
            outcome = self.finish()
            self.interrupts.requested = None
            raise KeyboardInterrupt(f"{asked}: stopped after step {outcome.step} of {self.total_steps} and saved")

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, as the job's section ``evaluation`` says, and log the values. Collective over all ranks.

        If the model was already evaluated after this step, the known values are returned.

        Raises:
            BuildError: the job has no section ``evaluation``.
        """
        if self.evaluator is None:
            raise BuildError("evaluate(): the job has no section 'evaluation' with the data; add one")
        run = self._between_steps("evaluate")
        with self._life.called(run):
            if run.evaluated is None or run.evaluated[0] != self.progress.step:
                run.evaluate()
        assert run.evaluated is not None
        return dict(run.evaluated[1])

    def save(self) -> None:
        """Save a checkpoint and wait until it is written; no effect if this step is saved. Collective over all ranks.

        Raises:
            CheckpointError: the checkpoint could not be written.
        """
        run = self._between_steps("save")
        with self._life.called(run), run.clock.paused():
            run.save()

    def export(
        self, directory: Path | str | None = None, kind: Literal["model", "adapter"] | None = None
    ) -> list[Path]:
        """Write the current model in Hugging Face layout; training may continue. Collective over all ranks.

        If the run was never opened, it is opened from its newest checkpoint first. The current weights are written also
        if the job says ``export: best``.

        Args:
            directory: target directory, replaced if it exists; by default ``<run>/model`` or ``<run>/adapter``.
            kind: the model or the adapter; by default as the job's ``export`` says, or the model if ``directory`` is
                given.

        Returns:
            The directories that were written.

        Raises:
            BuildError: the model or the fine-tuning method has no such format.
            SaveError: a file cannot be written.
        """
        kind = "model" if kind is None and directory is not None else kind
        where = None if directory is None else Path(directory)
        self._check_awake("export")
        run = self._life.run if self._life.started else self._life.opened()
        if run is None:
            with self.topology.watchdog.during("checkpoint"), self.step.evaluation_weights():
                return self._parts.export(self.progress, kind, where, False, lambda _done, _total: None)
        with self._life.called(run), run.clock.paused():
            self.topology.watchdog.phase("checkpoint", self.progress.step)
            return run.export(kind, where)

    def sleep(self, *tags: Tag) -> int:
        """Release device memory for other programs, such as an engine that generates rollouts.

        The tensors stay the same objects, with their shapes, dtypes, meshes and placements; their contents are kept in
        pinned host memory, and must not be used. Prefetched packs are dropped and fetched again. A running save is
        waited for. Tags that are already asleep are ignored. Collective over all ranks.

        Args:
            tags: ``weights`` (parameters and buffers of all models), ``optimizer`` (its state, and gradients) and
                ``communicators`` (memory of NCCL); by default all of them.

        Returns:
            Number of bytes that tensors have released on this rank's device.

        Raises:
            TrainingError: a tag does not exist, or the method was called inside a step.
            BuildError: this version of torch cannot release communicators. After this error, or if host memory is too
                small, the tags of this call are awake, and the run can continue.
        """
        sleeper, step = self._parts.sleeper, self.progress.step
        chosen = tuple(tag for tag in sleeper.settle(tags) if tag not in sleeper.asleep)
        if not chosen:
            return 0
        run = self._between_steps("sleep", awake=False)
        with self._life.called(run):
            run.settle_writes()
            self.events.emit(ev.SleepStarts(step, chosen))
            self.prefetcher.load_state(self.prefetcher.state())
        freed = sleeper.sleep(chosen)
        self.events.emit(ev.SleepEnds(step, chosen, freed))
        return freed

    def wake(self, *tags: Tag) -> int:
        """Allocate the released device memory again and restore its contents; training then continues as before.

        Collective over all ranks.

        Args:
            tags: see :meth:`sleep`; tags that are awake are ignored.

        Returns:
            Number of bytes that tensors occupy again on this rank's device.

        Raises:
            torch.OutOfMemoryError: device memory is too small; nothing is lost, and the call can be repeated.
        """
        sleeper, step = self._parts.sleeper, self.progress.step
        chosen = tuple(tag for tag in sleeper.settle(tags) if tag in sleeper.asleep)
        if not chosen:
            return 0
        self.events.emit(ev.WakeStarts(step, chosen))
        taken = sleeper.wake(chosen)
        self.events.emit(ev.WakeEnds(step, chosen, taken))
        return taken

    def finish(self) -> Outcome:
        """Save, export if the run is finished and the job asks for it, and close the run. Collective over all ranks.

        Raises:
            D9dError: see :meth:`train`.
        """
        self.wake()
        run = self._between_steps("finish")
        return self._life.finish(run)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._life.run
        if run is None:
            return
        alone = self.topology.world_size == 1
        if error is None or (isinstance(error, KeyboardInterrupt | SystemExit) and alone):
            self.wake()
            self._life.finish(run)
            return
        if isinstance(error, Exception):
            run.rescue(error)  # only effective for a single rank: other ranks may be anywhere
        self._life.abort(run, error)

    def _between_steps(self, call: str, awake: bool = True) -> OpenRun:
        if awake:
            self._check_awake(call)
        run = self._life.opened()
        if run.busy:
            raise TrainingError(f"{call}() was called inside a step; call it between two steps of steps()")
        return run

    def _check_awake(self, call: str) -> None:
        if asleep := self._parts.sleeper.asleep:
            raise TrainingError(f"{call}(): {' and '.join(asleep)} are asleep; call wake() first")

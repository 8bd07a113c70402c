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
    """Trainer of a built job: all of it (:meth:`train`), or some steps at a time.

    In a notebook, or in a loop of one's own::

        with job.build() as trainer:
            for result in trainer.steps(100):  # with the logging, evaluations and checkpoints of the job
                print(result.loss)  # waits for the device
            trainer.evaluate()
            trainer.export("draft")

    The block's end saves and closes the run; so does :meth:`finish`. Its collaborators are public, so that they can be
    used alone. Made by :func:`d9d_engine.compose.training.build`.

    Args:
        parts: its collaborators.
    """

    def __init__(self, parts: Collaborators) -> None:
        self._parts = parts
        self._life = LifeCycle(parts)
        parts.topology.watchdog.rest()  # what a caller does before it trains has no limit

    @property
    def job(self) -> JobConfig:
        """Resolved job."""
        return self._parts.job

    @property
    def topology(self) -> Topology:
        """This process among others."""
        return self._parts.topology

    @property
    def progress(self) -> Progress:
        """Counters of the run, from its start on."""
        return self._life.progress

    @property
    def stage(self) -> nn.Module:
        """Model as this rank holds it: all of it, or its pipeline stages as one module."""
        return self._parts.stage

    @property
    def step(self) -> TrainStep:
        """One training step, which takes a step number and a pack."""
        return self._parts.step

    @property
    def total_steps(self) -> int:
        """Number of steps of the whole run."""
        return self._parts.total_steps

    @property
    def prefetcher(self) -> DevicePrefetcher:
        """Packs on the device."""
        return self._parts.prefetcher

    @property
    def trackers(self) -> TrackerHub:
        """Trackers of the run."""
        return self._parts.trackers

    @property
    def log(self) -> RunLog:
        """Log for values of one's own, which the trackers get."""
        return self._parts.log

    @property
    def evaluator(self) -> Evaluator | None:
        """Evaluator, if the job has a section ``evaluation``."""
        return self._parts.evaluator

    @property
    def checkpointer(self) -> Checkpointer:
        """Checkpoints of the run."""
        return self._parts.checkpointer

    @property
    def interrupts(self) -> Interrupts:
        """Requests to stop."""
        return self._parts.interrupts

    @property
    def events(self) -> Events:
        """Observers."""
        return self._parts.events

    def train(self) -> Outcome:
        """Train until all steps are done or an interrupt arrives, from the newest checkpoint if there is one.

        Ctrl-C and SIGTERM, on any rank, let all ranks finish the same step, save, and return. Collective over all
        ranks.

        Raises:
            NonFiniteError: a loss or gradient was not finite and the policy is ``error``.
            CheckpointError: a checkpoint could not be read or written.
            TrainingError: a plugin wanted to end the process; what is sound is saved.
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
        """Open the run and continue from its newest checkpoint; nothing if it is open. Collective over all ranks.

        The other methods do this where it is needed.

        Raises:
            CheckpointError: a checkpoint could not be read.
        """
        self._check_awake("start")
        self._life.opened()

    def steps(self, count: int | None = None) -> Iterator[ev.StepResult]:
        """Train some steps, with the log entries, evaluations and checkpoints that are due. Collective over all ranks.

        Between two of them, any code may run; it does not count in the speed that is logged.

        Args:
            count: how many at most; all that are left, if absent.

        Yields:
            The result of each step, as tensors on the device. There are fewer than ``count`` where the run ends before.

        Raises:
            KeyboardInterrupt: Ctrl-C or SIGTERM arrived in a step. All ranks have finished the same step; the run is
                saved and closed, and the next call continues it.
            TrainingError: it was called inside a step.
            D9dError: see :meth:`train`.
        """
        run = self._between_steps("steps")
        if self.progress.step >= self.total_steps:
            self._parts.note(f"nothing left to train: all {self.total_steps} steps are done")
        done = 0
        while (count is None or done < count) and not run.is_over:
            self._check_awake("steps")  # the caller may have let it sleep since
            with self.interrupts.kept(), self._life.called(run):
                result = run.advance()
            done += 1
            yield result
            if run is not self._life.run:
                return  # it was finished meanwhile
        if run.stops:
            asked = self.interrupts.requested or "another rank"
            outcome = self.finish()
            self.interrupts.requested = None
            raise KeyboardInterrupt(f"{asked}: stopped after step {outcome.step} of {self.total_steps} and saved")

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, as ``evaluation`` of the job says, and log the values. Collective over all ranks.

        Raises:
            BuildError: the job has no such section.
        """
        if self.evaluator is None:
            raise BuildError("evaluate(): the job has no section 'evaluation', which says on what data; add one")
        run = self._between_steps("evaluate")
        with self._life.called(run):
            if run.evaluated is None or run.evaluated[0] != self.progress.step:
                run.evaluate()
        assert run.evaluated is not None
        return dict(run.evaluated[1])

    def save(self) -> None:
        """Save a checkpoint now and wait until it exists; nothing if this step is saved. Collective over all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        run = self._between_steps("save")
        with self._life.called(run), run.clock.paused():
            run.save()

    def export(
        self, directory: Path | str | None = None, kind: Literal["model", "adapter"] | None = None
    ) -> list[Path]:
        """Write the model as it is now in Hugging Face layout; training may go on. Collective over all ranks.

        A run that was never open is opened, and continues from its newest checkpoint, if it has one.

        Args:
            directory: replaced if it exists; by default ``<run>/model`` or ``<run>/adapter``.
            kind: the model, or what the fine-tuning method added; by default what the job's ``export`` says, and of a
                directory the model.

        Returns:
            The directories.

        Raises:
            BuildError: the model or the method has no such layout.
            SaveError: they cannot be written.
        """
        kind = "model" if kind is None and directory is not None else kind
        where = None if directory is None else Path(directory)
        self._check_awake("export")
        run = self._life.run if self._life.started else self._life.opened()
        if run is None:
            with self.topology.watchdog.during("checkpoint"), self.step.evaluation_weights():
                return self._parts.export(self.progress, kind, where)
        with self._life.called(run), run.clock.paused():
            self.topology.watchdog.phase("checkpoint", self.progress.step)
            return run.export(kind, where)

    def sleep(self, *tags: Tag) -> int:
        """Release memory of the device for somebody else, such as the engine that makes rollouts.

        The tensors stay the same objects, with their shapes, dtypes, meshes and placements; their contents wait in
        pinned memory of the host. Nobody may use them meanwhile. Packs that were fetched ahead are fetched again.
        A checkpoint that is being written is waited for. What sleeps already is left alone. Collective over all ranks.

        Args:
            tags: ``weights`` (parameters and buffers of all models), ``optimizer`` (its state, and gradients) and
                ``communicators`` (what NCCL has allocated); all of them, if none is named.

        Returns:
            Bytes that the tensors had on this rank's device.

        Raises:
            TrainingError: there is no such tag, or it was called inside a step.
            BuildError: this version of torch cannot release communicators. Then, and if the host has no memory for the
                contents, everything is awake, and the run goes on.
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
        """Take memory of the device back; training then goes on as if nothing had happened. Collective over all ranks.

        Args:
            tags: see :meth:`sleep`; what is awake is left alone.

        Returns:
            Bytes of the tensors on this rank's device.

        Raises:
            torch.OutOfMemoryError: the device has no room; nothing is lost, and another call tries again.
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
        """Save, export what the job asks for if all steps are done, and close the run. Collective over all ranks.

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
            run.rescue(error)  # if this rank is alone: others may be anywhere
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

"""Trainer: a run from its start to its end, at once or some steps at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from d9d_core import events as ev
from d9d_core.config.job import JobConfig
from d9d_core.errors import BuildError, TrainingError
from d9d_core.failures import ended_by, exits_are_errors, source_of
from d9d_core.protocols.tracker import RunInfo
from torch import nn

from d9d_engine.distributed.mesh import Topology
from d9d_engine.run.checkpointer import Checkpointer, Progress
from d9d_engine.run.evaluation import Evaluator
from d9d_engine.run.gc import built_objects_spared
from d9d_engine.run.interrupt import Interrupts
from d9d_engine.run.open_run import Collaborators, OpenRun
from d9d_engine.run.prefetch import DevicePrefetcher
from d9d_engine.step.randomness import generators_kept
from d9d_engine.step.step import TrainStep
from d9d_engine.trackers.hub import TrackerHub


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
    """Trainer of a built job: all of it (:meth:`train`), or some steps at a time.

    In a notebook, or in a loop of one's own::

        with job.build() as trainer:
            for result in trainer.steps(100):  # with the logging, evaluations and checkpoints of the job
                print(result.loss)  # waits for the device
            trainer.evaluate()
            trainer.export("draft")

    The block's end saves and closes the run; so does :meth:`finish`. Its collaborators are public, so that they can be
    used alone. Made by :func:`d9d_engine.build.compose.build`.

    Args:
        parts: its collaborators.

    Attributes:
        progress: counters of the run, from its start on.
    """

    def __init__(self, parts: Collaborators) -> None:
        self._parts = parts
        self.progress = Progress()
        self._run: OpenRun | None = None

    @property
    def job(self) -> JobConfig:
        """Resolved job."""
        return self._parts.job

    @property
    def topology(self) -> Topology:
        """This process among others."""
        return self._parts.topology

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
    def events(self) -> ev.Events:
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
        if opens := self._run is None:
            run = self._restored(shown=self.topology.is_main)
        else:
            run = self._between_steps("train")
        with self.interrupts, run.bar:
            with self._guarded(run):
                if opens:
                    run.begin()
                while not run.is_over:
                    run.advance()
            return self._finish(run)

    def start(self) -> None:
        """Open the run and continue from its newest checkpoint; nothing if it is open. Collective over all ranks.

        The other methods do this where it is needed.

        Raises:
            CheckpointError: a checkpoint could not be read.
        """
        self._opened()

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
            with self.interrupts.kept(), self._called(run):
                result = run.advance()
            done += 1
            with run.clock.paused():
                yield result
            if run is not self._run:
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
        with self._called(run):
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
        with self._called(run), run.clock.paused():
            run.save()

    def export(
        self, directory: Path | str | None = None, kind: Literal["model", "adapter"] | None = None
    ) -> list[Path]:
        """Write the model as it is now in Hugging Face layout; training may go on. Collective over all ranks.

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
        if self._run is None:
            return self._parts.export(self.progress, kind, where)
        with self._called(self._run), self._run.clock.paused():
            self.topology.watchdog.phase("checkpoint", self.progress.step)
            return self._parts.export(self.progress, kind, where)

    def finish(self) -> Outcome:
        """Save, export what the job asks for if all steps are done, and close the run. Collective over all ranks.

        Raises:
            D9dError: see :meth:`train`.
        """
        return self._finish(self._between_steps("finish"))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run = self._run
        if run is None:
            return
        if error is None or (isinstance(error, KeyboardInterrupt) and self.topology.world_size == 1):
            self._finish(run)
            return
        # Other ranks may be anywhere.
        if isinstance(error, Exception):
            run.rescue(error)
        self._abort(run, error)

    def _between_steps(self, call: str) -> OpenRun:
        run = self._opened()
        if run.busy:
            raise TrainingError(f"{call}() was called inside a step; call it between two steps of steps()")
        return run

    def _opened(self) -> OpenRun:
        """Return the open run, or open it."""
        if self._run is None:
            run = self._restored(shown=False)
            with self._called(run):
                run.begin()
        assert self._run is not None
        return self._run

    def _restored(self, shown: bool) -> OpenRun:
        """Continue from the newest checkpoint, and open what a run writes to.

        Args:
            shown: show a bar of the steps.
        """
        with ExitStack() as owned:
            owned.enter_context(self._prefetching())
            owned.enter_context(self.checkpointer.store.opened())
            owned.enter_context(built_objects_spared())
            with exits_are_errors(), generators_kept(self.topology.device):
                self.progress, tracker_states = self.checkpointer.restore()
                progress, total = self.progress, self.total_steps
                if progress.step >= total:
                    reached = f"the checkpoint is at step {progress.step}, the job has {total} steps"
                    self._parts.note(f"nothing left to train: {reached}")
                elif reason := self._parts.reason_to_end:
                    self._parts.note(
                        f"nothing left to train: the run ended at step {progress.step} of {total}, {reason}"
                    )
                elif progress.step:
                    self._parts.note(f"resumed at step {progress.step} of {total}")
                self.checkpointer.record()
                self.trackers.open(self._run_info(progress.step), tracker_states)
            run = OpenRun(self._parts, self.progress, shown)
            run.owned = owned.pop_all()
        self._run = run
        return run

    @contextmanager
    def _prefetching(self) -> Iterator[None]:
        """End the prefetcher's thread after the block; packs fetched ahead are fetched again."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the first error counts
                self.prefetcher.load_state(self.prefetcher.state())
            raise
        self.prefetcher.load_state(self.prefetcher.state())

    @contextmanager
    def _guarded(self, run: OpenRun) -> Iterator[None]:
        """Close the run if the block fails, and save what a plugin that fails leaves sound."""
        run.busy = True
        try:
            with exits_are_errors(), generators_kept(self.topology.device):
                yield
        except KeyboardInterrupt as error:
            if self.interrupts.requested is not None or (source := source_of(error)) is None:
                self._abort(run, error)
                raise
            run.rescue(failure := ended_by(source, error))
            self._abort(run, failure)
            raise failure from error
        except BaseException as error:
            if isinstance(error, Exception):
                run.rescue(error)
            self._abort(run, error)
            raise
        finally:
            run.busy = False

    @contextmanager
    def _called(self, run: OpenRun) -> Iterator[None]:
        """Guard what a caller asks for between steps; what the caller does itself has no time limit."""
        if run.busy:  # in a handler of an event, whose failures are those of its subscriber
            yield
            return
        self.topology.watchdog.phase("step", self.progress.step)
        try:
            with self._guarded(run):
                yield
        finally:
            self.topology.watchdog.rest()

    def _finish(self, run: OpenRun) -> Outcome:
        with self._guarded(run):
            status = run.settle()
            run.deferred.close()
            self.trackers.close(status)
            done = ev.TrainingFinished if status == "finished" else ev.TrainingStopped
            self.events.emit(done(self.progress.step))
            if status == "finished":
                self.checkpointer.record_end(self.progress.step, self.total_steps, self._parts.reason_to_end)
        self._run = None
        run.owned.close()
        return Outcome(status, self.progress.step)

    def _abort(self, run: OpenRun, error: BaseException) -> None:
        """Close the run as failed."""
        self._run = None
        run.deferred.__exit__(type(error), error, error.__traceback__)
        self.trackers.close("failed")
        try:
            self.events.emit(ev.TrainingFailed(self.progress.step, error))
        except Exception as second:
            error.add_note(f"besides, a subscriber to TrainingFailed raised {second!r}")
        run.owned.__exit__(type(error), error, error.__traceback__)

    def _run_info(self, step: int) -> RunInfo:
        run = self.job.run
        return RunInfo(run.name, run.directory, run.description, self.job.resolved(), self.total_steps, step)

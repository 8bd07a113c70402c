"""Life cycle of a run: opening from the newest checkpoint, handling of failures, closing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

from d9d_core import events as ev
from d9d_core.failures import ended_by, exits_are_errors, source_of
from d9d_core.tracker import RunInfo

from d9d_engine.distributed.determinism import deterministic_algorithms
from d9d_engine.run.checkpointer import Progress, processes_of
from d9d_engine.run.directory import write_failure, write_stop
from d9d_engine.run.gc import built_objects_spared
from d9d_engine.run.open_run import Collaborators, OpenRun
from d9d_engine.step.randomness import generators_kept
from d9d_engine.supervision.failure import Failure, OtherRankError

__all__ = ["Outcome"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run.

    Attributes:
        status: ``finished`` if all steps are done or a subscriber ended the run; ``stopped`` if the run was interrupted
            and saved.
        step: number of optimizer steps done.
    """

    status: Literal["finished", "stopped"]
    step: int


class LifeCycle:
    """Life cycle of a trainer's run.

    Args:
        parts: objects that the trainer works with, such as model, optimizer and checkpointer.

    Attributes:
        progress: counters of the run.
        run: open run; ``None`` before opening and after closing.
        started: whether a run was ever opened; if so, the weights are at least as new as its newest checkpoint.
    """

    def __init__(self, parts: Collaborators) -> None:
        self._parts = parts
        self.progress = Progress()
        self.run: OpenRun | None = None
        self.started = False

    def opened(self) -> OpenRun:
        """Return the open run; open it if necessary."""
        if self.run is None:
            run = self.restored(shown=False)
            with self.called(run):
                run.begin()
        assert self.run is not None
        return self.run

    def restored(self, shown: bool) -> OpenRun:
        """Restore the newest checkpoint, and open the files and trackers of the run.

        Args:
            shown: whether to show a progress bar.
        """
        parts = self._parts
        self.started = True
        parts.topology.watchdog.phase("startup")
        with ExitStack() as owned:
            owned.enter_context(self._prefetching())
            owned.enter_context(parts.checkpointer.store.opened())
            owned.enter_context(built_objects_spared())
            owned.callback(parts.profiler.close)
            if parts.step.shared is not None:
                owned.callback(parts.step.shared.replicas.close)
            owned.enter_context(deterministic_algorithms(parts.job.deterministic))
            with exits_are_errors(), generators_kept(parts.topology.device):
                self.progress, tracker_states = parts.checkpointer.restore()
                step, total = self.progress.step, parts.total_steps
                if step >= total:
                    parts.note(f"nothing left to train: the checkpoint is at step {step}, the job has {total} steps")
                elif reason := parts.reason_to_end:
                    parts.note(f"nothing left to train: the run ended at step {step} of {total}, {reason}")
                elif step:
                    parts.note(f"resumed at step {step} of {total}{self._other_size()}")
                parts.profiler.check(step, total)
                if parts.job.deterministic and parts.topology.device.type != "cpu":
                    parts.note("warning: deterministic: deterministic algorithms may be slower")
                trains = step < total and parts.reason_to_end is None
                if trains:
                    self.progress.trained_by = None
                parts.checkpointer.record(step, trains)
                parts.trackers.open(self._run_info(step), tracker_states)
            run = OpenRun(self._parts, self.progress, shown)
            owned.enter_context(run.collection.paced())
            owned.enter_context(run.compilation.listening())
            run.owned = owned.pop_all()
        self.run = run
        return run

    @contextmanager
    def called(self, run: OpenRun) -> Iterator[None]:
        """Guard a method that the user calls between steps: only the method's own work has a time limit."""
        if run.busy:  # called by a handler of an event, whose failure counts as the subscriber's
            yield
            return
        self._parts.topology.watchdog.phase("step", self.progress.step)
        run.clock.go()
        try:
            with self.guarded(run):
                yield
        finally:
            run.clock.stop()
            self._parts.topology.watchdog.rest()

    @contextmanager
    def guarded(self, run: OpenRun) -> Iterator[None]:
        """Close the run if the block fails; a run of one process first saves a checkpoint if its state is valid."""
        run.busy = True
        try:
            with exits_are_errors(), generators_kept(self._parts.topology.device):
                yield
        except KeyboardInterrupt as error:
            if self._parts.interrupts.requested is not None or (source := source_of(error)) is None:
                self.abort(run, error)
                raise
            run.rescue(failure := ended_by(source, error))
            self.abort(run, failure)
            raise failure from error
        except BaseException as error:
            if isinstance(error, Exception):
                run.rescue(error)
            self.abort(run, error)
            raise
        finally:
            run.busy = False

    def finish(self, run: OpenRun) -> Outcome:
        """Finish the run: save, export and close it."""
        parts = self._parts
        with self.guarded(run):
            status, request = run.settle(), parts.interrupts.requested
            # Close before the outcome is written: the outcome must not hide that the run has failed on another rank.
            run.fail_together(lambda: self._close(run, status))
            if status == "finished":
                parts.checkpointer.record_end(self.progress.step, parts.total_steps, parts.reason_to_end)
            elif parts.topology.is_main and self.progress.step:
                write_stop(parts.job.run.directory, self.progress.step, parts.total_steps, request)
        self._closed()
        run.owned.close()
        return Outcome(status, self.progress.step)

    def _close(self, run: OpenRun, status: Literal["finished", "stopped"]) -> None:
        parts = self._parts
        run.deferred.close()
        parts.log.drain()
        parts.trackers.close(status)
        done = ev.TrainingFinished if status == "finished" else ev.TrainingStopped
        parts.events.emit(done(self.progress.step))

    def abort(self, run: OpenRun, error: BaseException) -> None:
        """Close the run with the status ``failed``."""
        self._closed()
        run.deferred.__exit__(type(error), error, error.__traceback__)
        with suppress(Exception):  # the device may have failed
            self._parts.log.drain()
        self._parts.trackers.close("failed")
        if isinstance(error, Exception):
            self._record_failure(error)
        try:
            self._parts.events.emit(ev.TrainingFailed(self.progress.step, error))
        except Exception as second:
            error.add_note(f"besides, a subscriber to TrainingFailed raised {second!r}")
        run.owned.__exit__(type(error), error, error.__traceback__)

    def _record_failure(self, error: Exception) -> None:
        topology, directory, step = self._parts.topology, self._parts.job.run.directory, self.progress.step
        if topology.is_main:
            # After a lost connection, the rank that failed writes its own error.
            agreed = isinstance(error, OtherRankError) or not Failure.of(error).second_hand
            if agreed or not topology.watchdog.failed_elsewhere():
                write_failure(directory, step, error)
        else:  # the first rank may be killed before it learns of this failure
            who, rank = topology.watchdog.who, topology.rank
            topology.watchdog.fails_first = lambda: write_failure(directory, step, error, who, rank)

    def _closed(self) -> None:
        self.run = None
        self._parts.interrupts.requested = None  # the request has been served
        self._parts.topology.watchdog.rest()

    @contextmanager
    def _prefetching(self) -> Iterator[None]:
        """Stop the prefetcher's thread after the block; a later run fetches the prefetched microbatches again."""
        try:
            yield
        except BaseException:
            with suppress(Exception):  # report the first error only
                self._parts.prefetcher.load_state(self._parts.prefetcher.state())
            raise
        self._parts.prefetcher.load_state(self._parts.prefetcher.state())

    def _other_size(self) -> str:
        """Text about a changed number of processes; empty if the resumed checkpoint has the same number."""
        before = processes_of(self.progress.trained_by or {})
        now = self._parts.topology.world_size
        return "" if before in (None, now) else f", on {now} process{'es' * (now > 1)} instead of {before}"

    def _run_info(self, step: int) -> RunInfo:
        job, run, total = self._parts.job, self._parts.job.run, self._parts.total_steps
        facts = (run.name, run.directory, run.description, self.progress.trained_by or job.resolved(), total, step)
        return RunInfo(*facts, {**self._parts.step.task.hparams(), **run.hparams}, tuple(run.tags))

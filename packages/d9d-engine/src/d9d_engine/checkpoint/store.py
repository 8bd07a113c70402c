"""Training checkpoints: tensors in safetensors files, everything else in JSON; no file is pickled.

    checkpoints/step-00000100/
        manifest.json                written last: format, step, tensor table, file sizes and checksums, job, plugins
        tensors-00000.safetensors    one file per rank that has tensors to write
        state.json                   data position, tracker runs, ...

The tensor table lists each tensor's global shape and shards, so any layout of ranks can load a checkpoint of any other.
A checkpoint is complete or absent: a local directory gets its name when it is complete, and a remote checkpoint exists
once its manifest, the last file, exists. Checksums reveal files that were damaged later.
"""

from __future__ import annotations

import json
import math
import platform
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_core.events import SaveReport
from d9d_weights.checkpoint.manifest import read_manifest, readable_bytes, verify_file, with_values
from d9d_weights.checkpoint.names import folder, steps_in, strays_in
from d9d_weights.files.open import open_store
from d9d_weights.sharding.agreement import on_all, on_main
from d9d_weights.sharding.collectives import all_gather_objects
from d9d_weights.sharding.shards import LocalShards, Owners, ReplicaSlice, check_memory, describe, signature
from torch import Tensor
from torch import distributed as dist

from d9d_engine.checkpoint.attempts import Attempts
from d9d_engine.checkpoint.background import Background
from d9d_engine.checkpoint.prune import Pruner
from d9d_engine.checkpoint.retention import Retention
from d9d_engine.checkpoint.save_job import SaveJob, unwritten
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.checkpoint.staging import Staged, Stager
from d9d_engine.distributed.mesh import Topology
from d9d_engine.supervision.identity import wait_until

__all__ = ["CheckpointStore"]

#: Number of ignored folders that a warning lists; further ones are only counted.
_SHOWN = 3
#: Seconds within which a rank must see a file that another rank has written.
_LATE_FILE = 10.0


class CheckpointStore:
    """Checkpoints of one run, written and read by all ranks together.

    The constructor is collective over all ranks of a distributed job.

    Args:
        directory: directory of the checkpoints: shared by all machines, or an fsspec address such as ``s3://...``.
        keep: number of newest checkpoints to keep, or retention rules; ``None`` keeps all.
        topology: rank, device, meshes and process groups of this process.
        asynchronous: write in the background during training, from copies in host memory.
        timeout: longest time for which ranks wait for another rank that reads or writes.
        tolerate: largest number of storage failures in a row after which a save is still repeated; see :meth:`save`.
        warn: called with a text on the first rank, in the writing thread.
    """

    def __init__(
        self,
        directory: Path | str,
        keep: Retention | int | None = None,
        topology: Topology | None = None,
        asynchronous: bool = False,
        timeout: timedelta = timedelta(hours=1),
        tolerate: int = 0,
        warn: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.directory = directory
        self.topology = topology or Topology()
        self.retention = keep if isinstance(keep, Retention) else Retention(keep)
        self.asynchronous = asynchronous
        self._storage = open_store(directory)
        self.group = _own_group(timeout) if self.topology.world_size > 1 else None
        self._foreign: set[int] = set()
        self._pruner = Pruner(self._storage, self.retention, self._foreign)
        self._stager = Stager()
        self._staged: Staged | None = None
        self._owners: Owners | None = None
        self._form: list[Any] | None = None  # shard signature of `_owners`
        # A pause must be shorter than the timeout, or the other ranks take it for a hang.
        longest = min(600.0, timeout.total_seconds() / 4)
        self._attempts = Attempts(tolerate, longest, self.group, warn if self.topology.is_main else lambda _text: None)
        self._superseded = threading.Event()
        self._owned: AbstractContextManager[None] | None = None  # set on the first rank while it owns the directory
        self._running: Background[SaveReport | None] | None = None
        self._reports: deque[SaveReport] = deque()

    def prepare(self) -> None:
        """Check before training that checkpoints can be written, and that all ranks see one directory.

        Collective over all ranks.

        Raises:
            CheckpointError: the directory cannot be created or written, or is not the same directory on all machines.
        """

        def create() -> list[str]:
            try:
                return [self._storage.prepare(), platform.node()]
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints cannot be written to {self.directory}: {error.strerror or error}; "
                    "choose another run.dir, or make this one writable"
                ) from error

        probe, first = on_main(create, self.group)

        def look() -> None:
            # Network file systems may show a new file some seconds late.
            if not wait_until(lambda: self._storage.is_visible(probe), _LATE_FILE, 0.2):
                raise CheckpointError(
                    f"{self.directory} is not shared: machine {self.topology.node_rank} ({platform.node()}) does not "
                    f"see a file that machine 0 ({first}) wrote there, so each has a directory of its own; set "
                    "run.dir, or checkpoint.dir, to a directory that all machines share"
                )

        try:
            on_all(look, self.group)
        finally:
            if self.topology.is_main:
                self._storage.forget(probe)

    def own(self) -> None:
        """Take ownership of the directory, until :meth:`opened` ends; does nothing if this process owns it already.

        A second launch of the run then fails at once. Meant for processes that do nothing but this run. Collective over
        all ranks.

        Raises:
            CheckpointError: another process owns the directory.
        """

        def take() -> None:
            if self._owned is None:
                owned = self._storage.owned()
                owned.__enter__()
                self._owned = owned

        on_main(take, self.group)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Own the directory inside the block, and remove unfinished files of a killed run.

        At the end, waits for a running save. Collective over all ranks.

        Raises:
            CheckpointError: another process owns the directory, or the last save failed.
        """
        self.own()
        try:
            yield
        except BaseException as error:
            self._settle(error)
            raise
        else:
            self.wait()
        finally:
            owned, self._owned = self._owned, None
            if owned is not None:
                owned.__exit__(None, None, None)

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, newest first, unverified. Collective over all ranks."""
        steps: list[int] = on_main(lambda: steps_in(self._storage), self.group)
        return steps

    def paths(self) -> list[Path]:
        """Directories of the checkpoints in a local store, newest first, unverified, as seen by this rank."""
        return [Path(self._storage.location(folder(step))) for step in steps_in(self._storage)]

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Newest usable checkpoint, the same on all ranks; damaged checkpoints are reported and skipped.

        Folders that do not have the name of their own step, such as ``step-7`` or a renamed copy, are reported and
        ignored. Each rank verifies a part of the files. Collective over all ranks.

        Args:
            warn: called with a text on the first rank.

        Raises:
            CheckpointError: checkpoints exist, but all are damaged.
        """
        strays: list[str] = on_main(lambda: strays_in(self._storage), self.group)
        unfinished: list[str] = on_main(self._storage.unfinished, self.group)
        problems = []
        found = None
        for step in self.steps():
            if folder(step) in unfinished:
                continue
            try:
                found = self.open(folder(step))
            except CheckpointError as error:
                problems.append(str(error))
                if self.topology.is_main:
                    warn(f"{error}; trying the one before")
                continue
            if found.step == step:
                break
            strays.append(f"{folder(step)} (a copy of step {found.step})")
            self._foreign.add(step)
            found = None
        if strays and self.topology.is_main:
            warn(
                f"{self.directory}: ignored {', '.join(strays[:_SHOWN])}"
                + (f" and {len(strays) - _SHOWN} more" if len(strays) > _SHOWN else "")
                + f": checkpoints are called {folder(7)} after their own step; rename or remove these"
            )
        if unfinished and self.topology.is_main:
            warn(
                f"{self.directory}: {', '.join(unfinished[:_SHOWN])}"
                + (f" and {len(unfinished) - _SHOWN} more" if len(unfinished) > _SHOWN else "")
                + f" {'is' if len(unfinished) == 1 else 'are'} incomplete, because a process was killed during the "
                f"save, and not used; {f'{found.name} is complete' if found else 'no earlier checkpoint exists'}"
            )
        if problems and found is None:
            raise CheckpointError(
                "no usable checkpoint: " + "; ".join(problems) + f"; remove {self.directory} to start from scratch"
            )
        return found

    def best(self) -> tuple[int, float] | None:
        """Step and value of the best checkpoint by the rule ``best``; ``None`` without the rule or without any value.

        Collective over all ranks.
        """
        found: list[Any] | None = on_main(self._pruner.best, self.group)  # JSON has no tuples
        return None if found is None else (found[0], found[1])

    def set_aside(self, newer_than: int) -> list[str]:
        """Rename the checkpoints newer than a step, which are unusable, and return their new locations.

        Collective over all ranks.
        """

        def move() -> list[str]:
            newer = [step for step in steps_in(self._storage) if step > newer_than and step not in self._foreign]
            return [self._storage.set_aside(folder(step)) for step in newer]

        moved: list[str] = on_main(move, self.group)
        return moved

    def prune(self, step: int, kept_before: Sequence[int] = ()) -> str | None:
        """Remove surplus checkpoints that are left because a process was killed after it had saved ``step``.

        Returns a warning if a checkpoint could not be removed. Collective over all ranks. For ``kept_before`` see
        :meth:`save`.
        """
        warning: str | None = on_main(lambda: self._pruner.prune(step, kept_before), self.group)
        return warning

    def reserve(self, tensors: Mapping[str, Tensor | ReplicaSlice]) -> None:
        """Allocate buffers for copies of these tensors now, not during the first save. Collective over all ranks."""
        own = self._own(*on_all(lambda: self._describe(tensors), self.group))
        on_all(lambda: self._stager.reserve(own), self.group)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | ReplicaSlice],
        values: Mapping[str, Any],
        facts: Mapping[str, Any],
        volatile: Collection[str] = (),
        score: float | None = None,
        kept_before: Sequence[int] = (),
        wait: bool = False,
        late_values: Callable[[], Mapping[str, Any]] = dict,
        tell: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> bool:
        """Write a checkpoint, then remove surplus checkpoints. Collective over all ranks.

        An asynchronous save returns once copies have been started: call :meth:`before_mutation` before the tensors
        change; :meth:`poll` reports the completed save. A previous save that is still running is waited for.

        If the storage fails, the save is repeated with growing pauses, up to the tolerated number of failures: in the
        background until the next save starts, or inside this method with ``wait``. A synchronous save without ``wait``
        makes one attempt per call; the caller repeats it (:attr:`failures`).

        Args:
            step: number of optimizer steps done.
            tensors: name -> tensor, on any device and in any layout; unsharded tensors are equal on all ranks.
            values: JSON values for ``state.json``; taken from the first rank.
            facts: JSON values that identify the job (config, plugins), for the manifest; taken from the first rank.
            volatile: names of tensors that may change before ``before_mutation`` is called.
            score: value by which the best checkpoints are chosen.
            kept_before: for each of these steps, the last checkpoint before it is kept.
            wait: return after the checkpoint is written, even if the store is asynchronous; makes no copies.
            late_values: returns further values for ``state.json``; may be slow. Called on the first rank, in the
                writing thread, after all tensors are written, once per attempt.
            tell: called in the writing thread with the bytes that this rank has written, and with the size of its file.

        Returns:
            Whether the checkpoint is written or being written; if false, call again. The same on all ranks.

        Raises:
            SaveError: this save (unless asynchronous) or the previous one failed more often than is tolerated, on any
                rank; earlier checkpoints are unchanged.
            CheckpointError: another failure on any rank; earlier checkpoints are unchanged.
        """
        started = time.perf_counter()
        self._superseded.set()
        self.wait()
        self._superseded = superseded = threading.Event()
        best = self.retention.best
        if best is not None and score is not None and math.isfinite(score):
            facts = {**facts, "score": {"series": best.series, "value": score}}
        name = folder(step)
        try:
            # Serialise the values now: they change while a background save runs.
            (local_shards, form), snapshot = on_all(
                lambda: (self._describe(tensors), self._snapshot(values, facts)), self.group
            )
            own = self._own(local_shards, form)
        except CheckpointError as error:
            raise CheckpointError(unwritten(self._storage.location(name), str(error))) from error
        content, facts = snapshot
        job = SaveJob(
            self._storage, name, step, lambda: with_values(content, late_values()), facts,
            rank=self.topology.rank, group=self.group, pruner=self._pruner, kept_before=kept_before, tell=tell,
        )  # fmt: skip
        if wait or not self.asynchronous:

            def write() -> SaveReport:
                return job.run(lambda: own, stall=None)

            beat = self.topology.watchdog.beat
            report = self._attempts.run(write, superseded, beat) if wait else self._attempts.once(write)
            self._reports.extend([report] if report else [])
            return report is not None
        ready = self._stage(own, frozenset(volatile))
        stall = time.perf_counter() - started
        self._running = Background(lambda: self._attempts.run(lambda: job.run(ready, stall), superseded), name)
        return True

    def before_mutation(self) -> None:
        """Make the device, not the host, wait for the copies of the last save. Call it before saved tensors change."""
        if self._staged is not None:
            self._staged.before_mutation()
            self._staged = None

    def poll(self) -> list[SaveReport]:
        """Reports of the saves that succeeded since the last call. Neither waits nor raises.

        The next :meth:`save` or :meth:`wait`, which all ranks call at the same step, raises the error of a failed save;
        see :attr:`failed`.
        """
        if self._running is not None and self._running.done and not self._running.failed:
            self.wait()
        reports = list(self._reports)
        self._reports.clear()
        return reports

    @property
    def failed(self) -> bool:
        """Whether the running save has failed, as known to this rank; ranks learn of a failure at different times."""
        return self._running is not None and self._running.failed

    @property
    def failures(self) -> int:
        """Number of storage failures in a row; the same on all ranks while no save is running."""
        return self._attempts.failures

    def wait(self) -> None:
        """Wait for the running save, if there is one, including repeated attempts.

        Raises:
            CheckpointError: the save failed on any rank; the same error on all ranks.
        """
        self._staged = None
        running, self._running = self._running, None
        if running is None:
            return
        seen = self.failures
        while not running.wait(1.0):
            if self.failures != seen:
                seen = self.failures
                self.topology.watchdog.beat()
        if report := running.result():
            self._reports.append(report)

    def _settle(self, error: BaseException) -> None:
        """Wait for the running save, or abandon it if its attempts fail; add its failure to ``error`` as a note."""
        self._superseded.set()
        # After failures, other ranks may pause before the next attempt, or may have ended; do not wait for them.
        if self.failures and self.group is not None:
            return
        try:
            self.wait()
        except Exception as second:  # includes a lost connection to another rank
            error.add_note(f"besides, {second}")

    def _describe(self, tensors: Mapping[str, Tensor | ReplicaSlice]) -> tuple[dict[str, LocalShards], list[Any]]:
        """Shards of ``tensors`` on this rank, and their signature, which changes if a tensor's layout changes."""
        local_shards = describe(tensors)
        form = signature(local_shards)
        if form != self._form:
            check_memory(local_shards)
        return local_shards, form

    def _own(self, local_shards: Mapping[str, LocalShards], form: list[Any]) -> dict[str, LocalShards]:
        """Shards that this rank writes; reassigned to ranks if any rank's shards changed. Collective over all ranks."""
        if any(all_gather_objects(form != self._form, self.group)) or self._owners is None:
            self._owners = Owners(all_gather_objects(form, self.group))
            self._form = form
        return self._owners.own(local_shards, self.topology.rank)

    def _stage(
        self, own: Mapping[str, LocalShards], volatile: frozenset[str]
    ) -> Callable[[], Mapping[str, LocalShards]]:
        try:
            self._staged = self._stager.stage(own, volatile)
        # For example, memory is exhausted. The planner raises the error later, so that all ranks learn of it.
        except Exception as error:
            failure = error

            def fail() -> Mapping[str, LocalShards]:
                raise failure

            return fail
        return self._staged.ready

    def _snapshot(self, values: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[bytes, dict[str, Any]]:
        if not self.topology.is_main:
            return b"", {}
        return readable_bytes(values), json.loads(readable_bytes(facts))

    def open(self, name: str) -> Checkpoint:
        """Open and verify the checkpoint of this name. Collective over all ranks.

        Raises:
            CheckpointError: the checkpoint is missing or damaged.
        """
        manifest = on_main(lambda: read_manifest(self._storage, name), self.group)
        ranks = range(self.topology.rank, len(manifest["files"]), self.topology.world_size)
        files = sorted(manifest["files"].items())

        def verify() -> None:
            for file, facts in (files[number] for number in ranks):
                verify_file(self._storage, name, file, facts)

        on_all(verify, self.group)
        return Checkpoint(self._storage, name, manifest, self.group)


def _own_group(timeout: timedelta) -> dist.ProcessGroup:
    # The store has its own group, because its background thread communicates during training.
    group = dist.new_group(timeout=timeout, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group

"""Training checkpoints: tensors in safetensors, everything else JSON, no pickle in any file.

    checkpoints/step-00000100/
        manifest.json                written last: format, step, tensor table, file sizes and checksums, job, plugins
        tensors-00000.safetensors    one file per rank that has something to write
        state.json                   data position, tracker runs, ...

The tensor table lists, for each tensor, its global shape and the shards it consists of, so any layout of ranks can load
what any other saved. A checkpoint is complete or absent: a directory appears by a rename, and where there is none, the
manifest makes the checkpoint exist. A file damaged later is found by its checksum.
"""

from __future__ import annotations

import json
import math
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
from d9d_weights.sharding.shards import LocalShards, Owners, check_memory, describe, signature
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

__all__ = ["CheckpointStore"]

#: Ignored folders that are spelled out; the rest is counted.
_SHOWN = 3


class CheckpointStore:
    """Store of the checkpoints of one run, written and read by all ranks together.

    Making one is collective over all ranks of a distributed job, as is everything that says so.

    Args:
        directory: where they lie; a directory that all machines share, or an fsspec address such as ``s3://...``.
        keep: how many of the newest stay, or a finer rule; ``None`` keeps all.
        topology: the ranks.
        asynchronous: write beside the training, from copies in the host's memory.
        timeout: how long ranks wait for each other while one reads or writes.
        tolerate: failures of the storage in a row that end no save; see :meth:`save`.
        warn: called on the first rank, in the thread that writes.
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
        self._form: list[Any] | None = None  # the signature that the owners were chosen for
        # A pause, too, must not look like a hang.
        longest = min(600.0, timeout.total_seconds() / 4)
        self._attempts = Attempts(tolerate, longest, self.group, warn if self.topology.is_main else lambda _text: None)
        self._superseded = threading.Event()
        self._owned: AbstractContextManager[None] | None = None  # on the first rank, once it is taken
        self._running: Background[SaveReport | None] | None = None
        self._reports: deque[SaveReport] = deque()

    def prepare(self) -> None:
        """Make sure that saving will work, before hours of training. Collective over all ranks.

        Raises:
            CheckpointError: the directory cannot be created or written, or some rank does not see it.
        """

        def create() -> None:
            try:
                self._storage.prepare()
            except OSError as error:
                raise CheckpointError(
                    f"checkpoints cannot be written to {self.directory}: {error.strerror or error}; "
                    "choose another run.dir, or make this one writable"
                ) from error

        def look() -> None:
            if not self._storage.is_visible():
                raise CheckpointError(f"{self.directory} is not there; checkpoints need a directory all machines share")

        on_main(create, self.group)
        on_all(look, self.group)

    def own(self) -> None:
        """Own the directory from now on, as the only run, until :meth:`opened` ends; nothing if it is owned already.

        For processes that do nothing else: a second launch then fails at once. Collective over all ranks.

        Raises:
            CheckpointError: another run works with it.
        """

        def take() -> None:
            if self._owned is None:
                owned = self._storage.owned()
                owned.__enter__()
                self._owned = owned

        on_main(take, self.group)

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Own the directory while the block runs, as the only run, and clear up what a killed one left.

        A save that is under way is waited for at the end. Collective over all ranks.

        Raises:
            CheckpointError: another run works with it, or the last save failed.
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
        """Steps of the checkpoints that exist, newest first, unverified. Collective over all ranks."""
        steps: list[int] = on_main(lambda: steps_in(self._storage), self.group)
        return steps

    def paths(self) -> list[Path]:
        """Directories of the checkpoints in a local store, newest first, unverified, as this rank sees them."""
        return [Path(self._storage.location(folder(step))) for step in steps_in(self._storage)]

    def newest(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """Newest usable checkpoint, the same on all ranks; damaged ones are reported and passed over.

        Folders that no save made so, such as ``step-7`` or a copy of another step's, are reported and ignored. Every
        rank verifies a part of the files. Collective over all ranks.

        Args:
            warn: called on the first rank.

        Raises:
            CheckpointError: there are checkpoints, but all are damaged.
        """
        strays: list[str] = on_main(lambda: strays_in(self._storage), self.group)
        problems = []
        found = None
        for step in self.steps():
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
        if problems and found is None:
            raise CheckpointError(
                "no usable checkpoint: " + "; ".join(problems) + f"; remove {self.directory} to start from scratch"
            )
        return found

    def set_aside(self, newer_than: int) -> list[str]:
        """Set checkpoints aside that could not be used, and return where they are. Collective over all ranks."""

        def move() -> list[str]:
            newer = [step for step in steps_in(self._storage) if step > newer_than and step not in self._foreign]
            return [self._storage.set_aside(folder(step)) for step in newer]

        moved: list[str] = on_main(move, self.group)
        return moved

    def prune(self, step: int, kept_before: Sequence[int] = ()) -> str | None:
        """Remove what a process killed after saving this step had yet to remove; returns what went wrong.

        Collective over all ranks. For ``kept_before`` see :meth:`save`.
        """
        warning: str | None = on_main(lambda: self._pruner.prune(step, kept_before), self.group)
        return warning

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Allocate the memory for copies of these tensors now, not during the first save. Collective over all ranks."""
        own = self._own(*on_all(lambda: self._describe(tensors), self.group))
        on_all(lambda: self._stager.reserve(own), self.group)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        facts: Mapping[str, Any],
        volatile: Collection[str] = (),
        score: float | None = None,
        kept_before: Sequence[int] = (),
        wait: bool = False,
        late_values: Callable[[], Mapping[str, Any]] = dict,
    ) -> bool:
        """Write a checkpoint, then remove those that are kept no longer. Collective over all ranks.

        An asynchronous save returns as soon as copies are under way: :meth:`before_mutation` must be called before
        the tensors change, :meth:`poll` says when the checkpoint exists. The save before is waited for.

        If the storage fails, the save is tried again with growing pauses, as often as is tolerated: beside the
        training, until the next save takes its place, or while this method waits. A synchronous save that does not
        ``wait`` is left to the caller, after :attr:`failures` in a row.

        Args:
            step: optimizer steps done.
            tensors: by name, on any device, sharded in any way; the same values on all ranks unless sharded.
            values: JSON values for ``state.json``; the first rank's count.
            facts: JSON values that identify the job (config, plugins), for the manifest; the first rank's count.
            volatile: names of tensors that may change before ``before_mutation`` is called.
            score: the value by which the best checkpoint is chosen.
            kept_before: steps before each of which the last checkpoint stays.
            wait: return when it exists, even if the store is asynchronous; needs no memory for copies.
            late_values: further values for ``state.json``, which may take time; called by the first rank, when all
                tensors are written, in the thread that writes, and again if the storage fails.

        Returns:
            Whether the checkpoint exists or is under way; else the caller is to try again. The same on all ranks.

        Raises:
            SaveError: the storage failed once too often in this save (unless asynchronous) or the one before, on any
                rank; earlier checkpoints are untouched.
            CheckpointError: something else went wrong, likewise.
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
            # Values are taken now: in the background, they would have changed.
            (local_shards, form), snapshot = on_all(
                lambda: (self._describe(tensors), self._snapshot(values, facts)), self.group
            )
            own = self._own(local_shards, form)
        except CheckpointError as error:
            raise CheckpointError(unwritten(self._storage.location(name), str(error))) from error
        content, facts = snapshot
        job = SaveJob(
            self._storage, name, step, lambda: with_values(content, late_values()), facts,
            rank=self.topology.rank, group=self.group, pruner=self._pruner, kept_before=kept_before,
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
        """Call before saved tensors change: the device, not the host, waits for the copies of the last save."""
        if self._staged is not None:
            self._staged.before_mutation()
            self._staged = None

    def poll(self) -> list[SaveReport]:
        """Reports of the saves that succeeded since the last call. Does not wait, and raises nothing.

        A failure is raised by the next :meth:`save` or :meth:`wait`, which all ranks call at the same step; see
        :attr:`failed`.
        """
        if self._running is not None and self._running.done and not self._running.failed:
            self.wait()
        reports = list(self._reports)
        self._reports.clear()
        return reports

    @property
    def failed(self) -> bool:
        """Whether the save under way has failed, as far as this rank knows. Ranks learn of it at different moments."""
        return self._running is not None and self._running.failed

    @property
    def failures(self) -> int:
        """Number of attempts in a row that the storage has failed; the same on all ranks when no save is under way."""
        return self._attempts.failures

    def wait(self) -> None:
        """Wait for the save that is under way, if there is one, through all its attempts.

        Raises:
            CheckpointError: it failed, on any rank; the same error on all.
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
        """Wait without letting a failed save hide another error; one that is tried again is given up."""
        self._superseded.set()
        # Others may be in a pause, or gone.
        if self.failures and self.group is not None:
            return
        try:
            self.wait()
        except Exception as second:  # the connection to another rank, too
            error.add_note(f"besides, {second}")

    def _describe(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, LocalShards], list[Any]]:
        """Shards that this rank holds, and their signature."""
        local_shards = describe(tensors)
        form = signature(local_shards)
        if form != self._form:
            check_memory(local_shards)
        return local_shards, form

    def _own(self, local_shards: Mapping[str, LocalShards], form: list[Any]) -> dict[str, LocalShards]:
        """Shards that this rank writes, decided anew if any rank holds other ones. Collective over all ranks."""
        if any(all_gather_objects(form != self._form, self.group)) or self._owners is None:
            self._owners = Owners(all_gather_objects(form, self.group))
            self._form = form
        return self._owners.own(local_shards, self.topology.rank)

    def _stage(
        self, own: Mapping[str, LocalShards], volatile: frozenset[str]
    ) -> Callable[[], Mapping[str, LocalShards]]:
        try:
            self._staged = self._stager.stage(own, volatile)
        except Exception as error:  # out of memory, perhaps: the other ranks are told by the planner
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
        """Checkpoint of this name, verified. Collective over all ranks."""
        manifest = on_main(lambda: read_manifest(self._storage, name), self.group)
        ranks = range(self.topology.rank, len(manifest["files"]), self.topology.world_size)
        files = sorted(manifest["files"].items())

        def verify() -> None:
            for file, facts in (files[number] for number in ranks):
                verify_file(self._storage, name, file, facts)

        on_all(verify, self.group)
        return Checkpoint(self._storage, name, manifest, self.group)


def _own_group(timeout: timedelta) -> dist.ProcessGroup:
    # Nobody else's, because the background thread communicates while training does.
    group = dist.new_group(timeout=timeout, backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group

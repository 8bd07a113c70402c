"""Saves one checkpoint, and then removes old checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from d9d_core.errors import CheckpointError, SaveError
from d9d_core.events import SaveReport
from d9d_weights.files.directory import DirectoryStore
from d9d_weights.sharding.agreement import collected_failures, is_known_to_all, reason
from d9d_weights.sharding.shards import LocalShards
from torch import distributed as dist

from d9d_engine.checkpoint.prune import Pruner


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Save of one checkpoint, independent of the thread that runs it.

    Attributes:
        storage: directory of the run's checkpoints.
        name: name of the new checkpoint.
        step: number of optimizer steps done.
        values: returns the contents of ``state.json``; called last, on the first rank.
        facts: JSON values for the manifest; taken from the first rank.
        rank: rank of this process.
        group: process group of all ranks; must not be used elsewhere while the save runs.
        pruner: removes old checkpoints.
        kept_before: for each of these steps, the last checkpoint before it is kept.
        tell: called with the bytes that this rank has written so far, and with the size of its file.
    """

    storage: DirectoryStore
    name: str
    step: int
    values: Callable[[], bytes]
    facts: Mapping[str, Any]
    rank: int
    group: dist.ProcessGroup | None
    pruner: Pruner
    kept_before: Sequence[int] = ()
    tell: Callable[[int, int], None] = lambda _done, _total: None

    def run(self, ready: Callable[[], Mapping[str, LocalShards]], stall: float | None) -> SaveReport:
        """Write and publish the checkpoint, and remove old checkpoints. Collective over ``group``.

        Args:
            ready: returns the shards that this rank writes, with their final values.
            stall: seconds that training waited; ``None`` if training waits for the whole save.

        Raises:
            SaveError: the storage failed on some rank; the same error on all ranks. Written files are removed.
            CheckpointError: another failure on some rank; the same error on all ranks. Written files are removed.
        """
        # Imported here, because it imports torch.distributed.checkpoint, which training itself does not need.
        from d9d_engine.checkpoint import save as dcp_save

        began = time.perf_counter()
        draft, location = self.storage.draft(self.name), self.storage.location(self.name)
        writer = dcp_save.CheckpointWriter(draft, self.rank, self.step, self.values, self.facts, self.tell)
        try:
            size = dcp_save.save(dcp_save.ShardPlanner(ready), writer, self.group)
        except BaseException as error:
            if self.rank == 0:
                draft.discard()  # no rank continues to write
            if is_known_to_all(error, self.group):
                kind = SaveError if _of_storage(error) else CheckpointError
                raise kind(unwritten(location, reason(error))) from error
            raise
        took = time.perf_counter() - began
        warning = self.pruner.prune(self.step, self.kept_before) if self.rank == 0 else None
        return SaveReport(self.step, location, took if stall is None else stall, took, size, warning)


def _of_storage(error: BaseException) -> bool:
    collected = collected_failures(error)
    failures = [error] if collected is None else collected.values()
    return any(isinstance(failure, OSError) for failure in failures)


def unwritten(location: str, why: str) -> str:
    """Error message for a save that failed."""
    return f"checkpoint {location} could not be written: {why}; earlier checkpoints are unchanged"

"""Loading of an existing checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_weights.checkpoint.manifest import read_state
from d9d_weights.files.directory import DirectoryStore
from d9d_weights.sharding.agreement import is_known_to_all, on_all, on_main, reason
from d9d_weights.sharding.shards import ReplicaSlice, describe
from torch import Tensor
from torch import distributed as dist


class Checkpoint:
    """Complete and verified checkpoint.

    Args:
        storage: directory of the run's checkpoints.
        name: name of the checkpoint's folder.
        manifest: contents of ``manifest.json``.
        group: process group of the ranks that load the checkpoint.
    """

    def __init__(
        self, storage: DirectoryStore, name: str, manifest: Mapping[str, Any], group: dist.ProcessGroup | None
    ) -> None:
        self.name = name
        self.manifest = manifest
        self._storage = storage
        self._group = group

    @property
    def location(self) -> str:
        """Path or address of the checkpoint."""
        return self._storage.location(self.name)

    @property
    def step(self) -> int:
        """Number of optimizer steps done at the time of the checkpoint."""
        return int(self.manifest["step"])

    def values(self) -> dict[str, Any]:
        """Saved values other than tensors, from ``state.json``. Collective over all ranks.

        Raises:
            CheckpointError: ``state.json`` cannot be read.
        """
        values: dict[str, Any] = on_main(lambda: read_state(self._storage, self.name), self._group)
        return values

    def load_into(
        self,
        tensors: Mapping[str, Tensor | ReplicaSlice],
        scope: str = "",
        optional: Collection[str] = (),
        only: bool = False,
        on_bytes: Callable[[int], None] = lambda _count: None,
    ) -> None:
        """Copy tensors whose names begin with ``scope`` into the tensors of the same names. Collective over all ranks.

        Args:
            tensors: name -> tensor to fill, in any layout; each rank reads the data of its shards.
            scope: prefix of the names to compare and load.
            optional: names of tensors that the checkpoint may lack; such tensors keep their values.
            only: whether further tensors in the checkpoint are allowed, and ignored.
            on_bytes: called after each read of this rank with the number of its bytes.

        Raises:
            CheckpointError: names, shapes or dtypes differ on any rank (then no rank copies any data), or a rank cannot
                read a file.
        """
        # Imported here, because it imports torch.distributed.checkpoint, which a new run does not need.
        from d9d_engine.checkpoint import load as dcp_load

        table = {
            name: entry
            for name, entry in self.manifest["tensors"].items()
            if name.startswith(scope) and (not only or name in tensors)
        }
        local_shards = on_all(lambda: describe(tensors), self._group)
        planner = dcp_load.WindowPlanner(local_shards, frozenset(optional), table)
        try:
            dcp_load.load(planner, dcp_load.WindowReader(self._storage, self.name, table, on_bytes), self._group)
        except BaseException as error:
            if is_known_to_all(error, self._group):
                raise CheckpointError(f"{self.location} cannot be loaded: {reason(error)}") from error
            raise

"""Reading of a checkpoint that exists."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from d9d_core.errors import CheckpointError
from d9d_weights.checkpoint.manifest import read_state
from d9d_weights.files.directory import DirectoryStore
from d9d_weights.sharding.agreement import is_known_to_all, on_all, on_main, reason
from d9d_weights.sharding.shards import describe
from torch import Tensor
from torch import distributed as dist


class Checkpoint:
    """Saved checkpoint, complete and verified.

    Args:
        storage: where it lies.
        name: of its folder.
        manifest: the contents of ``manifest.json``.
        group: the ranks that read it together.
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
        """Optimizer steps done when the checkpoint was taken."""
        return int(self.manifest["step"])

    def values(self) -> dict[str, Any]:
        """Values that are no tensors. Collective over all ranks.

        Raises:
            CheckpointError: they cannot be read.
        """
        values: dict[str, Any] = on_main(lambda: read_state(self._storage, self.name), self._group)
        return values

    def load_into(
        self, tensors: Mapping[str, Tensor], scope: str = "", optional: Collection[str] = (), only: bool = False
    ) -> None:
        """Copy every tensor whose name begins with ``scope`` into the one of the same name. Collective over all ranks.

        Args:
            tensors: of any layout; each rank reads what its shards need.
            scope: only names that begin so are compared.
            optional: names that the checkpoint may lack; such tensors stay as they are.
            only: whether the checkpoint may have others besides.

        Raises:
            CheckpointError: names, shapes or dtypes differ, on any rank; nothing is copied then, on none.
        """
        from d9d_engine.checkpoint import load as dcp_load  # with all of torch's checkpoints; a new run needs none

        table = {
            name: entry
            for name, entry in self.manifest["tensors"].items()
            if name.startswith(scope) and (not only or name in tensors)
        }
        local_shards = on_all(lambda: describe(tensors), self._group)
        planner = dcp_load.WindowPlanner(local_shards, frozenset(optional), table)
        try:
            dcp_load.load(planner, dcp_load.WindowReader(self._storage, self.name, table), self._group)
        except BaseException as error:
            if is_known_to_all(error, self._group):
                raise CheckpointError(f"{self.location} cannot be loaded: {reason(error)}") from error
            raise

"""Loading through torch.distributed.checkpoint, from any layout into any other: each rank reads the bytes it needs."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence, Set
from os import PathLike
from typing import Any

import torch
from d9d_core.errors import CheckpointError
from d9d_weights.files.directory import DirectoryStore
from d9d_weights.files.safetensors import TensorFile
from d9d_weights.sharding.shards import LocalShards, dtype_name
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_loader as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

#: Number of problems that an error lists; further ones are only counted.
_SHOWN = 3


class WindowPlanner(LoadPlanner):
    """Load planner that fills this rank's shards.

    Args:
        local_shards: name -> shards of this rank, to be filled.
        optional: names of tensors that the checkpoint may lack; such tensors keep their values.
        known: tensors of the checkpoint, name -> ``dtype`` and ``shape``; some rank must load each of them.
    """

    def __init__(
        self, local_shards: Mapping[str, LocalShards], optional: Set[str], known: Mapping[str, Mapping[str, Any]]
    ) -> None:
        self._local = local_shards
        self._optional = optional
        self._known = known
        self._metadata = Metadata({})

    def set_up_planner(
        self,
        state_dict: Any,  # noqa: ARG002 - the shards are known from the constructor
        metadata: Metadata | None = None,
        is_coordinator: bool = False,  # noqa: ARG002
    ) -> None:
        """Store the metadata of the checkpoint."""
        assert metadata is not None
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Plan the reads of this rank; the plan also has the names, dtypes and shapes that this rank wants."""
        items: list[ReadItem] = []
        for name, local in self._local.items():
            entry = self._metadata.state_dict_metadata.get(name)
            if isinstance(entry, TensorStorageMetadata) and tuple(entry.size) == local.shape:
                chunks = [ChunkStorageMetadata(torch.Size(p.offset), torch.Size(p.shape)) for p in local.shards]
                items += create_read_items_for_chunk_list(name, entry, chunks)
        wanted = {name: (dtype_name(local.dtype), list(local.shape)) for name, local in self._local.items()}
        return LoadPlan(items, planner_data=wanted)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the tensors that any rank wants with the tensors of the checkpoint, before any data is read.

        Raises:
            CheckpointError: names, shapes or dtypes differ.
        """
        problems: dict[str, None] = {}  # an ordered set
        wanted: set[str] = set()
        for plan in global_plan:
            wanted |= plan.planner_data.keys()
            for name, here in plan.planner_data.items():
                if name in self._known:
                    there = (self._known[name]["dtype"], self._known[name]["shape"])
                    if there != here:
                        problems[f"'{name}' is {there[0]} {there[1]} there and {here[0]} {here[1]} here"] = None
                elif name not in self._optional:
                    problems[f"'{name}' is not in the checkpoint"] = None
        problems |= {f"'{name}' is in the checkpoint only": None for name in self._known if name not in wanted}
        if problems:
            raise CheckpointError(
                f"the checkpoint was saved by a different job: {_summary(list(problems))}; "
                "restore that part of the job, or use another run.name"
            )
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Always raise: values that are not tensors are in a JSON file, which this planner does not read."""
        raise NotImplementedError("this planner reads tensors only; read other values with Checkpoint.values()")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the part of a local shard into which one read copies its data."""
        offset = tuple(read_item.dest_index.offset or ())
        shard = next(shard for shard in self._local[read_item.dest_index.fqn].shards if shard.offset == offset)
        tensor = shard.tensor
        for dim, (first, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            tensor = tensor.narrow(dim, first, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the tensor is the shard's own memory."""


class WindowReader(StorageReader):
    """Storage reader that reads parts of the tensors in a checkpoint's files.

    Args:
        storage: directory of the run's checkpoints.
        name: name of the checkpoint.
        table: tensor table from the manifest, limited to the tensors to read.
        on_bytes: called after each read with the number of its bytes.
    """

    def __init__(
        self,
        storage: DirectoryStore,
        name: str,
        table: Mapping[str, Any],
        on_bytes: Callable[[int], None] = lambda _count: None,
    ) -> None:
        self._storage = storage
        self._name = name
        self._table = table
        self._on_bytes = on_bytes
        self._shards = {
            MetadataIndex(tensor, torch.Size(shard["offset"])): shard
            for tensor, entry in table.items()
            for shard in entry["pieces"]
        }

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Do nothing: a reader is used once."""

    def read_metadata(self) -> Metadata:
        """Metadata of the checkpoint: the manifest's tensor table in torch's form."""
        return Metadata({name: _metadata(entry) for name, entry in self._table.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: the constructor has all arguments."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the parts of tensors that a plan lists, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self._shards[item.storage_index]["file"], []).append(item)
        for file, items in by_file.items():
            with self._storage.open(self._name, file) as source:
                tensors = TensorFile(source, file)
                for item in items:
                    target = planner.resolve_tensor(item)
                    tensors.read(self._shards[item.storage_index]["key"], item.storage_offsets, target)
                    planner.commit_tensor(item, target)
                    self._on_bytes(target.nbytes)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:  # noqa: ARG003
        """Return False, which has no effect: the constructor's ``storage`` and ``name`` determine the files."""
        return False


def load(planner: WindowPlanner, reader: WindowReader, group: dist.ProcessGroup | None) -> None:
    """Load a checkpoint into the planner's shards. Collective over ``group``; ``None`` means one process.

    Raises:
        BaseException: the failure; with a group, a ``CheckpointException`` that lists failures by rank.
    """
    if group is not None:
        dcp.load({}, storage_reader=reader, planner=planner, process_group=group)
        return
    # These are the steps of dcp.load, without its warning about the missing process group.
    planner.set_up_planner({}, reader.read_metadata(), is_coordinator=True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    reader.read_data(planner.finish_plan(reader.prepare_global_plan(plans)[0]), planner).wait()


def _metadata(entry: Mapping[str, Any]) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(p["offset"]), torch.Size(p["shape"])) for p in entry["pieces"]]
    return TensorStorageMetadata(
        TensorProperties(dtype=getattr(torch, entry["dtype"])), torch.Size(entry["shape"]), chunks
    )


def _summary(problems: Sequence[str]) -> str:
    more = f" (and {len(problems) - _SHOWN} more)" if len(problems) > _SHOWN else ""
    return "; ".join(problems[:_SHOWN]) + more

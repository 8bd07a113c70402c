"""Saving through torch.distributed.checkpoint, with a planner and a writer that never pickle.

Each rank's planner gets the shards that the rank writes; the first rank merges them into one table and checks that
the shards of a tensor have as many elements as the tensor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from os import PathLike
from typing import Any

import torch
from d9d_core.errors import CheckpointError
from d9d_weights.checkpoint.manifest import manifest_bytes, tensors_file
from d9d_weights.checkpoint.manifest_model import VALUES, piece_key
from d9d_weights.files.directory import MANIFEST, Draft
from d9d_weights.files.safetensors import Written, write_tensors
from d9d_weights.sharding.shards import LocalShards, dtype_name
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint import state_dict_saver as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

#: Location of a shard: file, key in the file, size of the file in bytes, checksum of the file.
_Location = tuple[str, str, int, str]


class ShardPlanner(SavePlanner):
    """Save planner that writes exactly the given shards.

    Args:
        ready: returns this rank's shards with their final values; called once, in the thread that writes them.
    """

    def __init__(self, ready: Callable[[], Mapping[str, LocalShards]]) -> None:
        self._ready = ready
        self._tensors: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self,
        state_dict: Any,
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Do nothing: tensors come from ``ready``, which is called later so that its failure reaches all ranks."""

    def create_local_plan(self) -> SavePlan:
        """Plan to write each shard that this rank owns."""
        items = []
        for name, local in self._ready().items():
            for shard in local.shards:
                index = MetadataIndex(name, torch.Size(shard.offset))
                chunk = ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.shape))
                data = TensorWriteData(chunk, TensorProperties(dtype=local.dtype), torch.Size(local.shape))
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
                self._tensors[index] = shard.tensor
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the plans of all ranks into one table of shards.

        Raises:
            CheckpointError: the shards of a tensor have more or fewer elements than the tensor.
        """
        table: dict[str, TensorStorageMetadata] = {}
        for plan in all_plans:
            for item in plan.items:
                data, name = item.tensor_data, item.index.fqn
                assert data is not None
                entry = table.setdefault(name, TensorStorageMetadata(data.properties, data.size, []))
                entry.chunks.append(data.chunk)
        for name, entry in table.items():
            found = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if found != math.prod(entry.size):
                raise CheckpointError(
                    f"the saved shards of '{name}' have {found} elements, but the tensor has {math.prod(entry.size)}; "
                    "check that all ranks use the same mesh"
                )
        return all_plans, Metadata(dict(table))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        return self._tensors[write_item.index]


class CheckpointWriter(StorageWriter):
    """Storage writer of a checkpoint: one file per rank, then, on the first rank, ``state.json`` and the manifest.

    Args:
        draft: draft directory to fill.
        rank: rank of this process.
        step: number of optimizer steps done.
        values: returns the contents of ``state.json``; called on the first rank after all tensors are written.
        facts: JSON values for the manifest; taken from the first rank.
        tell: called with the bytes that this rank has written so far, and with the size of its file.
    """

    def __init__(
        self,
        draft: Draft,
        rank: int,
        step: int,
        values: Callable[[], bytes],
        facts: Mapping[str, Any],
        tell: Callable[[int, int], None],
    ) -> None:
        self._draft = draft
        self._rank = rank
        self._step = step
        self._values = values
        self._facts = facts
        self._tell = tell

    def reset(self, checkpoint_id: str | PathLike[str] | None = None) -> None:
        """Do nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Do nothing: the constructor has all arguments."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the draft directory. Runs on the first rank, before any rank writes."""
        self._draft.start()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, unless it has nothing to write."""
        results: Future[list[WriteResult]] = Future()
        results.set_result(self._write(plan, planner) if plan.items else [])
        return results

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write ``state.json`` and the manifest, and publish the checkpoint.

        Raises:
            CheckpointError: the first rank does not see the whole file of a rank.
        """
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        locations: list[_Location] = list(metadata.storage_data.values())
        files = {file: Written(size, digest) for file, _, size, digest in locations}
        for file, written in files.items():
            if self._draft.size(file) != written.bytes:
                raise CheckpointError(
                    f"{file} was written, but the first rank does not see the whole file; "
                    "checkpoints need a directory that all machines share"
                )
        values = self._values()
        with self._draft.create(VALUES) as out:
            out.write(values)
        files[VALUES] = Written(len(values), hashlib.sha256(values).hexdigest())
        self._draft.publish({MANIFEST: manifest_bytes(self._step, _table(metadata), files, self._facts)})
        metadata.planner_data = sum(written.bytes for written in files.values())  # sent to all ranks with the metadata

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:  # noqa: ARG003
        """Return False, which has no effect: the constructor's ``draft`` determines the files."""
        return False

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        keys = {item.index: _key(item) for item in plan.items}
        file = tensors_file(self._rank)
        tensors: dict[str, Tensor] = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[keys[item.index]] = tensor
        with self._draft.create(file) as out:
            written = write_tensors(out, tensors, self._tell)
        return [
            WriteResult(index, tensors[key].nbytes, (file, key, written.bytes, written.sha256))
            for index, key in keys.items()
        ]


def save(planner: ShardPlanner, writer: CheckpointWriter, group: dist.ProcessGroup | None) -> int:
    """Write a checkpoint and return its size in bytes. Collective over ``group``; ``None`` means one process.

    Raises:
        BaseException: the failure; with a group, a ``CheckpointException`` that lists failures by rank.
    """
    if group is not None:
        metadata = dcp.save({}, storage_writer=writer, planner=planner, process_group=group)
    else:
        # These are the steps of dcp.save, without its warning about the missing process group.
        plan = writer.prepare_local_plan(planner.create_local_plan())
        plans, metadata = planner.create_global_plan([plan])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(plan, planner).wait()])
    return int(metadata.planner_data)


def _key(item: WriteItem) -> str:
    """Key of a shard in its file: the tensor's name, with the shard's offset unless the shard is the full tensor."""
    data = item.tensor_data
    assert data is not None
    return piece_key(item.index.fqn, data.chunk.offsets, data.chunk.sizes == data.size)


def _table(metadata: Metadata) -> dict[str, Any]:
    table = {}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        shards = []
        for chunk in entry.chunks:
            file, key, *_ = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            shards.append({"file": file, "key": key, "offset": list(chunk.offsets), "shape": list(chunk.sizes)})
        dtype = dtype_name(entry.properties.dtype)
        table[name] = {"dtype": dtype, "shape": list(entry.size), "pieces": shards}
    return table

"""Export of a model to another layout, one group of tensors after the other, to limit host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from d9d_core.errors import SaveError
from d9d_core.tensors import full
from torch import Tensor
from torch import distributed as dist

from d9d_weights.graph.graph import StateGraph
from d9d_weights.hugging_face.shard import ShardWriter
from d9d_weights.hugging_face.writer import ModelWriter
from d9d_weights.sharding.agreement import on_all, on_main
from d9d_weights.sharding.stage_holders import StageHolders

__all__ = ["ModelFiles", "export_model"]


@dataclass(frozen=True)
class ModelFiles:
    """Files of a model other than tensors.

    Attributes:
        config_json: contents of ``config.json``.
        others: contents of further files by name, such as ``generation_config.json`` and the tokenizer files of the
            pretrained model.
        save_assets: function that writes further files, such as the data's tokenizer, into a directory; its files
            replace files of the same name in ``others``.
    """

    config_json: Mapping[str, Any]
    others: Mapping[str, bytes] = field(default_factory=dict)
    save_assets: Callable[[Path], None] | None = None


def export_model(
    writer: ModelWriter,
    graph: StateGraph,
    tensors: Mapping[str, Tensor],
    files: ModelFiles,
    group: dist.ProcessGroup | None = None,
    stage_holders: StageHolders | None = None,
) -> None:
    """Compute a graph's outputs from tensors in memory and write them as a model. Collective over ``group``.

    Each rank writes its own files. Tensors are gathered one after the other, in the graph's order on every rank; at
    most one group of outputs is in host memory at a time.

    Args:
        writer: writer made from the graph's ``specs``, equal on all ranks; all ranks see its directory.
        graph: graph over ``tensors``, or over the full model's tensors if pipeline ranks hold different tensors.
        tensors: plain tensors or DTensors.
        files: other files of the model.
        group: process group of all ranks that hold a part of the model; ``None`` for one process.
        stage_holders: for each tensor the rank that holds it, if pipeline ranks hold different tensors.

    Raises:
        SaveError: the storage failed; no directory is left then.
        CheckpointError: another failure, or a rank lacks a tensor that it should hold; no directory is left then.
    """
    rank, ranks = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    mine = frozenset(file for number, file in enumerate(writer.files) if number % ranks == rank)
    full_tensor: Callable[[str], Tensor] = lambda name: full(tensors[name])  # noqa: E731
    if stage_holders is not None:
        on_all(partial(stage_holders.check, tensors), group)
        full_tensor = partial(stage_holders.full, tensors=tensors)
    try:
        on_main(writer.start, group, SaveError)
        failed: list[Exception] = []
        with torch.no_grad():
            _write(writer, graph, full_tensor, mine, failed)
        on_all(lambda: _raise(failed), group, SaveError)
        on_main(lambda: writer.publish(files.config_json, files.others, files.save_assets), group, SaveError)
    except BaseException:
        if rank == 0:
            writer.discard()
        raise


def _write(
    writer: ModelWriter,
    graph: StateGraph,
    full_tensor: Callable[[str], Tensor],
    mine: frozenset[str],
    failed: list[Exception],
) -> None:
    """Write this rank's files. A rank that fails continues to gather, because the other ranks wait for it."""
    with ExitStack() as opened:
        shards: dict[str, ShardWriter] = {}
        for group in graph.groups:
            wanted = [] if failed else [name for name in group.outputs if writer.file_of(name) in mine]
            here: dict[str, Tensor] = {}
            for name in group.inputs:
                tensor = full_tensor(name)
                if wanted:
                    here[name] = tensor.detach().cpu()
                del tensor
            try:
                for name in wanted:
                    file = writer.file_of(name)
                    if file not in shards:
                        shards[file] = opened.enter_context(writer.open_shard(file))
                    shards[file].write(name, graph.outputs[name].tensor(here.__getitem__))
            except Exception as error:
                failed.append(error)
        if failed:
            # Incomplete files are removed, not checked; errors of the removal follow from the first failure.
            with suppress(Exception):
                opened.pop_all().__exit__(type(failed[0]), failed[0], failed[0].__traceback__)
            return
        try:
            opened.close()
        except Exception as error:
            failed.append(error)


def _raise(failed: list[Exception]) -> None:
    if failed:
        raise failed[0]

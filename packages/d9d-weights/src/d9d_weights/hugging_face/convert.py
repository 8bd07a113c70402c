"""Conversion of model directories and comparison of tensors, by windows, with little memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from d9d_core.errors import CheckpointError
from d9d_core.types import TensorSpec
from torch import Tensor

from d9d_weights.graph.expressions import TensorSource
from d9d_weights.graph.graph import StateGraph
from d9d_weights.hugging_face.blocks import blocks
from d9d_weights.hugging_face.shard import ShardWriter
from d9d_weights.hugging_face.writer import ModelWriter

__all__ = ["convert"]

#: Elements of a tensor that are compared at a time.
_BLOCK = 1 << 22


class _Tensors(TensorSource, Protocol):
    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...


def convert(
    graph: StateGraph,
    source: TensorSource,
    target: str,
    config_json: Mapping[str, Any],
    files: Mapping[str, bytes],
    shard_bytes: int,
    threads: int,
    on_bytes: Callable[[int], None],
) -> Sequence[str]:
    """Convert a model: write a graph's outputs as a model directory. Returns the names of its weight files.

    At most ``threads`` outputs, and their inputs, are in memory at a time.

    Args:
        graph: graph over the source's tensors.
        source: source of tensors, used by several threads.
        target: directory or fsspec address; it appears once it is complete.
        config_json: contents of ``config.json``.
        files: further files.
        shard_bytes: maximum bytes of a weight file.
        threads: number of threads that read.
        on_bytes: called after each written tensor, with its number of bytes.

    Raises:
        CheckpointError: a tensor cannot be read or written; no directory is left then.
    """
    writer = ModelWriter(target, graph.specs, shard_bytes)
    try:
        writer.start()
        for file in writer.files:
            with writer.open_shard(file) as shard:
                _write(graph, source, list(writer.tensors_of(file)), shard, threads, on_bytes)
        writer.publish(config_json, files)
    except BaseException as error:
        writer.discard()
        if isinstance(error, OSError):
            raise CheckpointError(f"{target} cannot be written: {error}") from error
        raise
    return writer.files


def _write(
    graph: StateGraph,
    source: TensorSource,
    names: Sequence[str],
    shard: ShardWriter,
    threads: int,
    on_bytes: Callable[[int], None],
) -> None:
    def read(name: str) -> Tensor:
        value = graph.outputs[name]
        tensor = torch.empty(value.spec.shape, dtype=value.spec.dtype)
        value.read(source, [0] * tensor.ndim, tensor)
        return tensor

    with ThreadPoolExecutor(threads) as pool:
        for first in range(0, len(names), threads):  # limits the number of tensors in memory
            some = names[first : first + threads]
            for name, tensor in zip(some, pool.map(read, some), strict=True):
                shard.write(name, tensor)
                on_bytes(tensor.nbytes)


def deviation(name: str, left: _Tensors, right: _Tensors, on_bytes: Callable[[int], None]) -> float:
    """Largest deviation between tensors of equal shape, in float64; infinite if only one of two elements is NaN.

    Different integers deviate by at least 1, even if float64 cannot tell them apart.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    largest = 0.0
    shape, dtypes = left.specs[name].shape, (left.specs[name].dtype, right.specs[name].dtype)
    for offset, size in blocks(shape, _BLOCK):
        a, b = (torch.empty(size, dtype=dtype) for dtype in dtypes)
        left.read(name, offset, a)
        right.read(name, offset, b)
        on_bytes(a.nbytes)
        if not (a.dtype == b.dtype and torch.equal(a, b)):
            wide_a, wide_b = a.double(), b.double()
            gap = (wide_a - wide_b).abs()
            gap[(wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())] = 0.0
            if a.dtype == b.dtype and not a.dtype.is_floating_point:
                gap[(a != b) & (gap == 0.0)] = 1.0
            largest = max(largest, gap.nan_to_num(nan=math.inf, posinf=math.inf).max().item())
    return largest

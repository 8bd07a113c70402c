"""From one place to another, and two places side by side; in windows, so that memory stays small."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from d9d_core.state.hub.shard import ShardWriter
from d9d_core.state.hub.writer import ModelWriter
from d9d_core.state.mapper import StateGraph
from d9d_core.state.mapper.values import TensorSource
from d9d_core.traits import TensorSpec

#: Numbers of a tensor that are compared at a time.
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
    """Write a graph's outputs as a model directory; returns its weight files.

    At most ``threads`` outputs are in memory at a time, and what they are made of.

    Args:
        graph: over the source's tensors.
        source: used by several threads.
        target: directory or fsspec address; appears when all is there.
        config_json: contents of ``config.json``.
        files: further files.
        shard_bytes: largest weight file.
        threads: that read at a time.
        on_bytes: told how many bytes are written.

    Raises:
        CheckpointError: something cannot be read or written; nothing is left then.
    """
    writer = ModelWriter(target, graph.specs, shard_bytes)
    writer.start()
    try:
        with ThreadPoolExecutor(threads) as pool:
            for file in writer.files:
                with writer.open_shard(file) as shard:
                    _write(
                        graph,
                        source,
                        [name for name in graph.outputs if writer.file_of(name) == file],
                        shard,
                        pool,
                        on_bytes,
                    )
        writer.publish(config_json, files)
    except BaseException:
        writer.discard()
        raise
    return writer.files


def _write(
    graph: StateGraph,
    source: TensorSource,
    names: Sequence[str],
    shard: ShardWriter,
    pool: ThreadPoolExecutor,
    on_bytes: Callable[[int], None],
) -> None:
    def read(name: str) -> Tensor:
        value = graph.outputs[name]
        tensor = torch.empty(value.spec.shape, dtype=value.spec.dtype)
        value.read(source, [0] * tensor.ndim, tensor)
        return tensor

    workers = pool._max_workers  # noqa: SLF001 - so many tensors wait, no more
    for first in range(0, len(names), workers):
        some = names[first : first + workers]
        for name, tensor in zip(some, pool.map(read, some), strict=True):
            shard.write(name, tensor)
            on_bytes(tensor.nbytes)


def deviation(name: str, left: _Tensors, right: _Tensors, on_bytes: Callable[[int], None]) -> float:
    """The largest difference of two equally shaped tensors, in float64; infinite where only one is NaN.

    Raises:
        CheckpointError: one cannot be read.
    """
    largest = 0.0
    shape, dtypes = left.specs[name].shape, (left.specs[name].dtype, right.specs[name].dtype)
    for offset, size in _blocks(shape):
        a, b = (torch.empty(size, dtype=dtype) for dtype in dtypes)
        left.read(name, offset, a)
        right.read(name, offset, b)
        on_bytes(a.nbytes)
        if a.numel() and not (a.dtype == b.dtype and torch.equal(a, b)):
            wide_a, wide_b = a.double(), b.double()
            gap = (wide_a - wide_b).abs()
            gap[(wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())] = 0.0
            largest = max(largest, gap.nan_to_num(nan=math.inf).max().item())
    return largest


def _blocks(shape: Sequence[int]) -> Iterator[tuple[list[int], list[int]]]:
    """Windows of whole rows, or of parts of them where rows are long."""
    if not shape or math.prod(shape) <= _BLOCK:
        yield [0] * len(shape), list(shape)
        return
    row = math.prod(shape[1:])
    if row > _BLOCK:
        for index in range(shape[0]):
            for offset, size in _blocks(shape[1:]):
                yield [index, *offset], [1, *size]
        return
    rows = max(1, _BLOCK // row)
    for first in range(0, shape[0], rows):
        yield [first, *[0] * (len(shape) - 1)], [min(rows, shape[0] - first), *shape[1:]]

"""Loading of a model's tensors from files in another layout; each rank reads only the data of its shards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import torch
from d9d_core.errors import CheckpointError
from d9d_core.tensors import is_dtensor, local
from torch import Tensor
from torch import distributed as dist

from d9d_weights.graph.expressions import TensorSource, Value
from d9d_weights.graph.graph import StateGraph
from d9d_weights.hugging_face.blocks import blocks
from d9d_weights.sharding.agreement import on_all
from d9d_weights.sharding.shards import TensorShard, describe

__all__ = ["check_duplicates", "load_tensors"]

#: Windows above this many bytes are split for several threads.
_TASK_BYTES = 1 << 26


def load_tensors(
    graph: StateGraph,
    source: TensorSource,
    targets: Mapping[str, Tensor],
    *,
    threads: int = 4,
    once: bool = False,
    copies: dist.ProcessGroup | None = None,
    group: dist.ProcessGroup | None = None,
    on_bytes: Callable[[int], None] = lambda _count: None,
) -> None:
    """Fill each target with the graph's output of the same name, converted to the target's dtype.

    Duplicates that the graph leaves out are not compared, see :func:`check_duplicates`. Host memory holds only the
    source's buffers, one per thread, unless the graph computes functions of full tensors.

    Args:
        graph: graph whose outputs include the targets.
        source: source of the graph's inputs, used by several threads.
        targets: plain tensors or DTensors on any device; the same names on all ranks.
        threads: number of threads that read.
        once: whether only one of the ranks that hold the same values reads them and sends them to the other ranks; by
            default each rank reads. Collective over the targets' meshes, and over ``copies``.
        copies: process group of the ranks that hold the same plain tensors, for ``once``.
        group: process group whose ranks agree on success; collective over it. With ``once``, the group must contain all
            loading ranks, because ranks that received nothing would continue otherwise.
        on_bytes: called by any thread after each filled window, with its number of bytes in the output's dtype.

    Raises:
        CheckpointError: a tensor cannot be read, on any rank; some targets are filled then.
    """
    on_all(lambda: _load(graph, source, targets, threads, once, copies, on_bytes), group)


def _load(
    graph: StateGraph,
    source: TensorSource,
    targets: Mapping[str, Tensor],
    threads: int,
    once: bool,
    copies: dist.ProcessGroup | None,
    on_bytes: Callable[[int], None],
) -> None:
    """Load the targets. A rank that fails stops reading but continues to send, because the other ranks wait for it."""
    local_shards = describe(targets)
    failed: list[BaseException] = []
    with torch.no_grad(), ThreadPoolExecutor(threads, thread_name_prefix="d9d-load") as pool:
        pending: dict[str, list[Future[None]]] = {}
        try:
            for name, target in targets.items():
                if not once or _reads(target, copies):
                    windows = [
                        window for shard in local_shards[name].shards for window in _tasks(graph.outputs[name], shard)
                    ]
                    pending[name] = [pool.submit(_fill, graph.outputs[name], source, w, on_bytes) for w in windows]
            for name, target in targets.items():
                for future in pending.pop(name, ()):
                    try:
                        future.result()
                    except CancelledError:
                        pass  # only the first error is raised, below
                    except Exception as error:
                        failed.append(error)
                        pool.shutdown(wait=False, cancel_futures=True)
                if once:
                    _send(target, copies)
        finally:  # an interrupt must not wait for the remaining files
            pool.shutdown(cancel_futures=True)
    if failed:
        raise failed[0]


def check_duplicates(graph: StateGraph, source: TensorSource) -> None:
    """Read the duplicates that a graph leaves out and their originals, and compare them.

    Raises:
        CheckpointError: a duplicate differs, so its values would be lost.
    """
    for duplicate in graph.duplicates:
        if not _equal(duplicate.copy, duplicate.original, source):
            raise CheckpointError(duplicate.otherwise)


def _equal(copy: Value, original: Value, source: TensorSource) -> bool:
    if copy.spec.shape != original.spec.shape:
        return False
    dtype = torch.promote_types(copy.spec.dtype, original.spec.dtype)
    for offset, size in blocks(copy.spec.shape, _TASK_BYTES // dtype.itemsize):
        one, other = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        copy.read(source, offset, one)
        original.read(source, offset, other)
        if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
            return False
    return True


def _fill(value: Value, source: TensorSource, window: TensorShard, on_bytes: Callable[[int], None]) -> None:
    value.read(source, window.offset, window.tensor)
    on_bytes(window.tensor.numel() * value.spec.dtype.itemsize)


def _tasks(value: Value, shard: TensorShard) -> Iterator[TensorShard]:
    """Windows that threads read separately; a tensor is split by rows only if rows of its source are contiguous."""
    tensor = shard.tensor
    row = math.prod(tensor.shape[1:]) * tensor.itemsize if tensor.ndim else 0
    if not value.keeps_rows or row == 0 or len(tensor) * row <= _TASK_BYTES:
        yield shard
        return
    rows = max(1, _TASK_BYTES // row)
    for first in range(0, len(tensor), rows):
        yield TensorShard((shard.offset[0] + first, *shard.offset[1:]), tensor[first : first + rows])


def _groups(target: Tensor, copies: dist.ProcessGroup | None) -> Sequence[tuple[dist.ProcessGroup, int]]:
    """Process groups over which a tensor is replicated, and this rank's index in each."""
    if is_dtensor(target):
        mesh = target.device_mesh
        repeated = [dim for dim, placement in enumerate(target.placements) if placement.is_replicate()]
        return [(mesh.get_group(dim), mesh.get_local_rank(dim)) for dim in repeated if mesh.size(dim) > 1]
    return [] if copies is None else [(copies, dist.get_rank(copies))]


def _reads(target: Tensor, copies: dist.ProcessGroup | None) -> bool:
    return all(rank == 0 for _, rank in _groups(target, copies))


def _send(target: Tensor, copies: dist.ProcessGroup | None) -> None:
    """Broadcast a tensor to its replicas: a DTensor over the dimensions that replicate it, others over ``copies``."""
    tensor = local(target)
    contiguous = tensor if tensor.is_contiguous() else tensor.contiguous()
    for group, _ in _groups(target, copies):
        dist.broadcast(contiguous, group_src=0, group=group)
    if contiguous is not tensor:
        tensor.copy_(contiguous)

"""Functions of whole matrices that are sharded over ranks.

A matrix sharded over one mesh dimension is gathered and computed on one rank; a matrix sharded over several mesh
dimensions, or in another order than the ranks', is gathered and computed on each rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from d9d_core.strategy import Collective
from d9d_core.tensors import is_dtensor, local
from torch import Tensor
from torch import distributed as dist

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def map_matrices(
    parts: Sequence[Tensor], layouts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Apply a function to whole matrices, or stacks of matrices, that are sharded over ranks.

    Collective over the ranks that shard a tensor. In a round, each of W ranks gathers one of W tensors, applies the
    function and scatters the result, with two all-to-alls. All ranks must pass the same tensors in the same order.
    Tensors whose matrices are whole on this rank need no communication: replicated matrices, which each rank computes,
    and stacks that are sharded between their matrices. A matrix that is sharded over several mesh dimensions, or in
    another order than the ranks', is gathered and computed by every rank.

    Args:
        parts: local shards of equal dtype, [rows, columns] or [matrices, rows, columns].
        layouts: for each shard the plain tensor, or the DTensor that has the full shape and the placements.
        function: maps a whole tensor to a tensor of the same shape; in a stack, each matrix separately.

    Returns:
        The local shards of the results.
    """
    results: list[Tensor | None] = [None] * len(parts)
    shared, everywhere = _sorted_out(layouts)
    together = {index for rounds in shared.values() for chosen in rounds for index in chosen}
    for index, (part, layout) in enumerate(zip(parts, layouts, strict=True)):
        if index in everywhere:
            results[index] = _map_everywhere(part, layout, function)
        elif index not in together:
            results[index] = function(part) if part.numel() else part
    for (group, dim, _), rounds in shared.items():
        for chosen in rounds:
            shapes = [tuple(layouts[index].shape) for index in chosen]
            mapped = _map_round([parts[index] for index in chosen], shapes, dim, group, function)
            for index, result in zip(chosen, mapped, strict=True):
                results[index] = result
    return [result for result in results if result is not None]


def matrix_collectives(layouts: Sequence[Tensor], itemsize: int) -> Iterable[Collective]:
    """Predict the collectives of :func:`map_matrices` on this rank, for elements of ``itemsize`` bytes."""
    shared, everywhere = _sorted_out(layouts)
    for (group, _, _), rounds in shared.items():
        ranks = tuple(dist.get_process_group_ranks(group))
        for chosen in rounds:
            parts = sum(local(layouts[index]).numel() for index in chosen) * itemsize
            whole = layouts[chosen[group.rank()]].numel() * itemsize if group.rank() < len(chosen) else 0
            for size, what in ((parts, "parts of matrices"), (whole, "computed matrices")):
                yield Collective("all_to_all", "ranks that share a matrix", ranks, size, 1, what)
    for index in everywhere:
        layout = layouts[index]
        for cut in _cuts(layout):
            ranks = tuple(dist.get_process_group_ranks(cut.group))
            size = layout.numel() * itemsize
            yield Collective("all_gather", "one cut of several", ranks, size, 1, "parts of a matrix", approximate=True)


_Rounds = dict[tuple[dist.ProcessGroup, int, int], list[list[int]]]


def _sorted_out(layouts: Sequence[Tensor]) -> tuple[_Rounds, set[int]]:
    """Divide tensors by the ranks that compute them, and return their indices.

    The first result maps (process group, sharded dim, number of dimensions) to rounds: lists of at most as many tensors
    as ranks, each computed by one rank. The second result has the tensors that every rank computes, because they are
    sharded over several mesh dimensions or in another order than the ranks'. The matrices of all other tensors are
    whole on this rank.
    """
    shared: dict[tuple[dist.ProcessGroup, int, int], list[int]] = {}
    everywhere = set()
    for index, layout in enumerate(layouts):
        cuts = list(_cuts(layout))
        if len(cuts) == 1 and cuts[0].plain:
            shared.setdefault((cuts[0].group, cuts[0].dim, layout.ndim), []).append(index)
        elif cuts:
            everywhere.add(index)
    rounds = {}
    for key, indices in shared.items():
        # Large tensors first, so that the ranks of a round have similar amounts of work.
        indices.sort(key=lambda index: (-layouts[index].numel(), index))
        ranks = key[0].size()
        rounds[key] = [indices[first : first + ranks] for first in range(0, len(indices), ranks)]
    return rounds, everywhere


@dataclass(frozen=True, slots=True)
class _Cut:
    """Sharding of a tensor along one mesh dimension.

    Attributes:
        group: process group of the mesh dimension.
        dim: sharded dimension of the tensor.
        plain: whether shards are in the order of the ranks.
    """

    group: dist.ProcessGroup
    dim: int
    plain: bool


def _cuts(layout: Tensor) -> Iterable[_Cut]:
    """Shardings of a tensor that cut its matrices: over more than one rank, in one of the last two dimensions."""
    if not is_dtensor(layout):
        return
    from torch.distributed.tensor import Shard

    mesh = layout.device_mesh
    for mesh_dim, placement in enumerate(layout.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and mesh.size(mesh_dim) > 1 and not (layout.ndim == 3 and dim == 0):
            yield _Cut(mesh.get_group(mesh_dim), dim, type(placement) is Shard)


def _map_everywhere(part: Tensor, layout: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Gather a matrix on all ranks of its mesh and compute it on each. Collective over the mesh."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert is_dtensor(layout)
    sharded: DTensor = DTensor.from_local(
        part, layout.device_mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
    )
    whole = function(sharded.full_tensor())
    return distribute_tensor(whole.contiguous(), layout.device_mesh, layout.placements, src_data_rank=None).to_local()


def _map_round(
    parts: Sequence[Tensor],
    shapes: Sequence[tuple[int, ...]],
    dim: int,
    group: dist.ProcessGroup,
    function: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """Apply a function to at most as many tensors as the group has ranks: rank r gathers and computes tensor r.

    Collective over ``group``: one all-to-all sends each tensor's shards to its rank, one returns the results' shards.

    Args:
        parts: this rank's shard of each tensor, divided along ``dim`` as by ``torch.chunk``.
        shapes: shapes of the whole tensors.
        dim: sharded dimension.
        group: process group, with ranks in the order of the shards.
        function: maps a whole tensor to a tensor of the same shape.

    Returns:
        This rank's shard of each result.
    """
    ranks, here = group.size(), group.rank()
    own = shapes[here] if here < len(shapes) else None
    own_parts = [] if own is None else [_with(own, dim, size) for size in _sizes(own[dim], ranks)]
    sent = [part.numel() for part in parts] + [0] * (ranks - len(parts))
    received = [torch.Size(shape).numel() for shape in own_parts] or [0] * ranks
    rows = _exchange([part.reshape(-1) for part in parts], sent, received, group, parts[0])
    returned: list[Tensor] = []
    if own_parts:
        pieces = [row.view(shape) for row, shape in zip(torch.split(rows, received), own_parts, strict=True)]
        result = function(torch.cat(pieces, dim))
        returned = [piece.reshape(-1) for piece in torch.split(result, [shape[dim] for shape in own_parts], dim)]
    back = _exchange(returned, received, sent, group, parts[0])
    return [row.view(part.shape) for row, part in zip(torch.split(back, sent), parts, strict=False)]


def _exchange(
    rows: Sequence[Tensor], sent: Sequence[int], received: Sequence[int], group: dist.ProcessGroup, like: Tensor
) -> Tensor:
    """All-to-all of flat tensors: ``sent[r]`` elements to rank r, ``received[r]`` elements from it.

    Elements are sent as bytes, because some backends lack some dtypes. Collective over ``group``.
    """
    outgoing = torch.cat(list(rows)) if rows else like.new_empty(0)
    incoming = like.new_empty(sum(received))
    size = like.element_size()
    dist.all_to_all_single(
        incoming.view(torch.uint8),
        outgoing.view(torch.uint8),
        [length * size for length in received],
        [length * size for length in sent],
        group=group,
    )
    return incoming


def _sizes(length: int, ranks: int) -> list[int]:
    """Lengths of a dimension's shards, as in DTensor: equal shards, then a shorter shard, then empty shards."""
    step = -(-length // ranks)
    return [max(0, min(step, length - rank * step)) for rank in range(ranks)]


def _with(shape: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])

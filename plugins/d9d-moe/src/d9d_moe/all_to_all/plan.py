"""Plan of a dispatch: the ranks that each token is sent to, and the labels that go with it.

A token travels once to each rank that has some of its experts, however many.

Shapes: T tokens, k experts of a token, W ranks, S rows that leave this rank, sorted by rank, then by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """Rows that leave this rank, as in :mod:`d9d_moe.dispatch.permutation`: the choices of a token are the ranks.

    Attributes:
        slots: int64 [T * min(W, k)] or [S] with padding, ``token * W + rank`` of each row; -1 for padding and beyond S.
        places: int64 [T, W], row for each rank; at least S if the token does not travel there.
        tokens: int64 [W], tokens for each rank.
        padded: rows reserved for each rank if that is known from shapes alone.
    """

    slots: Tensor
    places: Tensor
    tokens: Tensor
    padded: int | None


def make_plan(indices: Tensor, ranks: int, local: int, limit: int | None) -> Plan:
    """Make the plan of an all-to-all dispatch from shapes and device values alone; the host reads nothing.

    Args:
        indices: int64 [T, k], experts, or their number for nobody.
        ranks: W.
        local: experts of each rank.
        limit: most tokens for any expert; makes the number of rows static.
    """
    count = len(indices)
    goes = torch.zeros(count, ranks + 1, dtype=torch.bool, device=indices.device)
    goes = goes.scatter_(1, indices // local, value=True)[:, :ranks]  # nobody is beyond the last rank
    nth = goes.T.contiguous().cumsum(1).T  # [T, W], counted from 1; along rows, or each rank's would take one thread
    tokens = goes.sum(0)
    padded = None if limit is None else min(count, local * limit)
    rows = count * min(ranks, indices.shape[1]) if padded is None else padded * ranks
    first = tokens.cumsum(0) - tokens if padded is None else torch.arange(ranks, device=indices.device) * padded
    places = torch.where(goes, first + nth - 1, count * ranks)
    slots = torch.full((count * ranks + 1,), -1, dtype=torch.int64, device=indices.device)
    slots.scatter_(0, places.flatten(), torch.arange(count * ranks, device=indices.device))
    return Plan(slots[:rows], places, tokens, padded)


def write_labels(plan: Plan, indices: Tensor, weights: Tensor, nobody: int) -> Tensor:
    """Write the labels of rows in the plan of an all-to-all: all experts of their tokens, and the weights.

    Args:
        plan: rows that leave.
        indices: int64 [T, k].
        weights: [T, k].
        nobody: number of experts, which stands for nobody.

    Returns:
        Integers [S, 2 * k] as wide as the weights, [T * min(W, k), 2 * k] where S is not known: numbers of experts,
        ``nobody`` in padding, and the bits of the weights.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    integer = torch.int64 if wide.dtype == torch.float64 else torch.int32
    labels = torch.cat([indices.to(integer), wide.view(integer)], dim=1).index_select(0, tokens_of(plan))
    if plan.padded is not None:
        labels[:, : indices.shape[1]].masked_fill_((plan.slots < 0).unsqueeze(1), nobody)
    return labels


def tokens_of(plan: Plan) -> Tensor:
    """Token of each row that leaves, int64 like ``plan.slots``; any token for padding and beyond S."""
    return plan.slots.clamp(min=0) // plan.places.shape[1]


def read_labels(labels: Tensor, rank: int, local: int) -> tuple[Tensor, Tensor]:
    """Read experts [N, k] and weights float32 or float64 [N, k] from labels [N, 2 * k].

    Args:
        labels: of rows that arrived.
        rank: this one.
        local: experts of each rank.

    Returns:
        Integers, numbers among the experts of this rank, ``local`` for those of others, whose weights are zeros.
    """
    experts, bits = labels.chunk(2, dim=1)
    here = experts // local == rank
    weights = bits.view(torch.float64 if bits.dtype == torch.int64 else torch.float32)
    return torch.where(here, experts - rank * local, local), weights.where(here, 0.0)

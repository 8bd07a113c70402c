"""Plan of a dispatch: the ranks to which each token is sent, and the labels that are sent with the token.

A token is sent once to each rank that has any of its experts.

Shapes: T tokens, k experts of a token, W ranks, S rows to send, sorted by rank, then by token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Plan(NamedTuple):
    """Rows to send, in the form of :mod:`d9d_moe.dispatch.permutation` with a token's ranks in place of its experts.

    Attributes:
        slots: int64 [T * min(W, k)] or [S] with padding, ``token * W + rank`` of each row; -1 for padding and beyond S.
        places: int64 [T, W], row for each rank; at least S if the token is not sent to the rank.
        tokens: int64 [W], number of tokens for each rank.
        padded: number of rows reserved for each rank; ``None`` if the number is not known from shapes alone.
    """

    slots: Tensor
    places: Tensor
    tokens: Tensor
    padded: int | None


def make_plan(indices: Tensor, ranks: int, local: int, limit: int | None) -> Plan:
    """Make the plan of an all-to-all dispatch without reading device values on the host.

    Args:
        indices: int64 [T, k], expert of each choice; the number of experts for a dropped choice.
        ranks: W.
        local: number of experts on each rank.
        limit: maximum number of tokens of an expert, which makes the number of rows static; ``None`` for no limit.
    """
    count = len(indices)
    goes = torch.zeros(count, ranks + 1, dtype=torch.bool, device=indices.device)
    goes = goes.scatter_(1, indices // local, value=True)[:, :ranks]  # cuts column W, where dropped choices are marked
    nth = goes.T.contiguous().cumsum(1).T  # [T, W], from 1; a scan along rows is parallel
    tokens = goes.sum(0)
    padded = None if limit is None else min(count, local * limit)
    rows = count * min(ranks, indices.shape[1]) if padded is None else padded * ranks
    first = tokens.cumsum(0) - tokens if padded is None else torch.arange(ranks, device=indices.device) * padded
    places = torch.where(goes, first + nth - 1, count * ranks)
    slots = torch.full((count * ranks + 1,), -1, dtype=torch.int64, device=indices.device)
    slots.scatter_(0, places.flatten(), torch.arange(count * ranks, device=indices.device))
    return Plan(slots[:rows], places, tokens, padded)


def write_labels(plan: Plan, indices: Tensor, weights: Tensor, dropped: int) -> Tensor:
    """Write the labels of the rows to send: indices and weights of all experts of their tokens.

    Args:
        plan: rows to send.
        indices: int64 [T, k].
        weights: [T, k].
        dropped: index that stands for no expert: the number of experts.

    Returns:
        Integers [S, 2 * k] as wide as the weights, or [T * min(W, k), 2 * k] if S is unknown: indices of experts
        (``dropped`` in padding), then the bits of the weights.
    """
    wide = weights.to(torch.promote_types(weights.dtype, torch.float32))
    integer = torch.int64 if wide.dtype == torch.float64 else torch.int32
    labels = torch.cat([indices.to(integer), wide.view(integer)], dim=1).index_select(0, tokens_of(plan))
    if plan.padded is not None:
        labels[:, : indices.shape[1]].masked_fill_((plan.slots < 0).unsqueeze(1), dropped)
    return labels


def tokens_of(plan: Plan) -> Tensor:
    """Token of each row to send, int64 like ``plan.slots``; arbitrary for padding and beyond S."""
    return plan.slots.clamp(min=0) // plan.places.shape[1]


def read_labels(labels: Tensor, rank: int, local: int) -> tuple[Tensor, Tensor]:
    """Read experts [N, k] and weights float32 or float64 [N, k] from labels [N, 2 * k].

    Args:
        labels: labels of the received rows.
        rank: index of this rank.
        local: number of experts on each rank.

    Returns:
        Indices among the experts of this rank, or ``local`` for experts of other ranks; their weights are zero.
    """
    experts, bits = labels.chunk(2, dim=1)
    here = experts // local == rank
    weights = bits.view(torch.float64 if bits.dtype == torch.int64 else torch.float32)
    return torch.where(here, experts - rank * local, local), weights.where(here, 0.0)

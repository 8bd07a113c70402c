"""Deterministic selection of the best experts and groups, and of the rows beyond a capacity.

Shapes: T tokens, E experts, k experts of a token, G groups of E/G consecutive experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Number of best experts whose scores DeepSeek-V3 adds to rank a group.
_EXPERTS_PER_GROUP_SCORE = 2
#: Largest number of maxima searched one after another; for more, a sort is faster.
_MOST_MAXIMA = 16


def best(scores: Tensor, count: int) -> Tensor:
    """Indices int64 [..., count] of the highest scores [..., N], best first; of equal scores, the lowest index.

    ``torch.topk`` does not define which of equal scores it returns, so devices and releases differ. A stable sort has a
    defined order, but inductor took almost a minute to compile it for 128 experts. Up to 16 best float32 scores are
    therefore found as successive maxima of unique integers: the bits of the score in sorting order, then the reversed
    index. NaN counts as larger than all numbers, as in a sort.
    """
    if scores.dtype != torch.float32 or count > _MOST_MAXIMA:
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        return order[..., :count].contiguous()  # frees the other N - count columns
    places = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    keys = _ordered(scores).to(torch.int64).bitwise_left_shift(32).bitwise_or(places)
    found = []
    for _ in range(count):
        highest = keys.amax(dim=-1, keepdim=True)
        keys = keys.masked_fill(keys == highest, torch.iinfo(torch.int64).min)
        found.append(highest)
    return scores.shape[-1] - 1 - torch.cat(found, dim=-1).bitwise_and(2**32 - 1)


def _ordered(scores: Tensor) -> Tensor:
    """Integers int32 that sort like float32 numbers; positive and negative zero are equal, and all NaN are equal."""
    bits = scores.masked_fill(scores == 0, 0.0).masked_fill(scores.isnan(), torch.nan).view(torch.int32)
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits)


def keep_best_groups(scores: Tensor, groups: int, count: int) -> Tensor:
    """Set scores [T, E] to minus infinity except in each token's ``count`` best groups.

    The score of a group is the sum of its two best scores (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2, node-limited
    routing); of equal groups, the lowest index is better.
    """
    grouped = scores.view(len(scores), groups, scores.shape[1] // groups)
    group_best = grouped.gather(-1, best(grouped, _EXPERTS_PER_GROUP_SCORE))  # a single score for groups of one expert
    kept = best(group_best.sum(dim=-1), count)  # [T, count]
    dropped = torch.ones_like(group_best[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def over_capacity(indices: Tensor, limit: int | Tensor) -> Tensor:
    """Mask, bool [T, k], of the choices that exceed an expert's capacity of ``limit`` rows.

    The first choices of all tokens come before the second choices; choices of the same number are in token order:
    Lepikhin et al. 2020, "GShard", algorithm 1; Fedus et al. 2021, "Switch Transformers", section 2.2.

    Args:
        indices: int64 [T, k], experts of each token, best first.
        limit: maximum number of rows of an expert, as a number or a 0-d tensor.
    """
    chosen, order = torch.sort(indices.T.flatten(), stable=True)
    rows = torch.arange(len(order), device=order.device)
    first = torch.searchsorted(chosen, chosen)  # first row of the same expert
    late = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, rows - first >= limit)
    return late.view(indices.T.shape).T

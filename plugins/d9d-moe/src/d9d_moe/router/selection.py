"""Reproducible selection of the best experts and groups, and of the rows beyond a capacity.

Shapes: T tokens, E experts, k experts of a token, G groups of E/G neighbouring experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: DeepSeek-V3 ranks a group by the sum of its two best experts.
_EXPERTS_PER_GROUP_SCORE = 2
#: Most maxima that are looked for one after the other; beyond, a sort is faster.
_MOST_MAXIMA = 16


def best(scores: Tensor, count: int) -> Tensor:
    """Selection of the best: indices int64 [..., count] of the highest scores [..., N]; of equals, the lowest index.

    ``torch.topk`` leaves open which of equals it returns, so devices and releases differ. A stable sort does not, but
    inductor's seems to take most of a minute to compile for 128 experts. So the few best of float32 scores are maxima
    of integers, one after the other: a score's bits in the order of numbers, then its place from behind, so that no two
    are equal. NaN is above all numbers, as in a sort.
    """
    if scores.dtype != torch.float32 or count > _MOST_MAXIMA:
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
        return order[..., :count].contiguous()  # lets the rest go, which is N / count times as large
    places = torch.arange(scores.shape[-1] - 1, -1, -1, device=scores.device)
    keys = _ordered(scores).to(torch.int64).bitwise_left_shift(32).bitwise_or(places)
    found = []
    for _ in range(count):
        highest = keys.amax(dim=-1, keepdim=True)
        keys = keys.masked_fill(keys == highest, torch.iinfo(torch.int64).min)
        found.append(highest)
    return scores.shape[-1] - 1 - torch.cat(found, dim=-1).bitwise_and(2**32 - 1)


def _ordered(scores: Tensor) -> Tensor:
    """Integers int32 in the order of float32 numbers; zeros of both signs are equal, and all NaN."""
    bits = scores.masked_fill(scores == 0, 0.0).masked_fill(scores.isnan(), torch.nan).view(torch.int32)
    return torch.where(bits < 0, bits ^ torch.iinfo(torch.int32).max, bits)


def keep_best_groups(scores: Tensor, groups: int, count: int) -> Tensor:
    """Mask scores [T, E] with minus infinity in all but each token's ``count`` best groups.

    A group is worth the sum of its two best scores (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2, node-limited
    routing); the better of equals is the lower one.
    """
    grouped = scores.view(len(scores), groups, scores.shape[1] // groups)
    group_best = grouped.gather(-1, best(grouped, _EXPERTS_PER_GROUP_SCORE))  # a group of one has one
    kept = best(group_best.sum(dim=-1), count)  # [T, count]
    dropped = torch.ones_like(group_best[..., 0], dtype=torch.bool).scatter_(-1, kept, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def over_capacity(indices: Tensor, limit: int | Tensor) -> Tensor:
    """Mask of choices, bool [T, k], beyond an expert's capacity of ``limit`` rows, first come, first served.

    The first choices of all tokens come before any second one, and within each earlier tokens before later ones:
    Lepikhin et al. 2020, "GShard", algorithm 1; Fedus et al. 2021, "Switch Transformers", section 2.2.

    Args:
        indices: int64 [T, k], experts of each token, best first.
        limit: rows that an expert takes, as a number or 0-d.
    """
    chosen, order = torch.sort(indices.T.flatten(), stable=True)
    rows = torch.arange(len(order), device=order.device)
    first = torch.searchsorted(chosen, chosen)  # of the rows of the same expert
    late = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, rows - first >= limit)
    return late.view(indices.T.shape).T

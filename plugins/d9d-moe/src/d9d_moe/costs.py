"""Costs of mixtures of experts, for cost descriptions of models. Imports no torch.

Tokens are taken to be spread evenly over experts. All sizes are those of one rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from d9d_core.cost import Exchange, OpCost, Weight
from d9d_nn.costs import silu_mul

_FLOAT32 = 4
#: Bytes of a number of rows; each rank is sent how many come to it, and how many to each of its experts.
_COUNT = 8


def router(
    rows: float, features: int, experts: int, width: int, *, weights: tuple[Weight, ...] = ()
) -> tuple[OpCost, ...]:
    """Cost of a top-k router: scores in float32, softmax and choice."""
    flops = 2 * rows * features * experts
    scores, traffic = _FLOAT32 * rows * experts, width * rows * features
    return (
        OpCost("router", "product", flops, 2 * flops, traffic, 2 * traffic, rows=rows, weights=weights),
        OpCost("choice of experts", "memory", traffic=4 * scores, backward_traffic=4 * scores, kept=2 * scores),
    )


def grouped_swiglu(
    rows: float,
    features: int,
    inside: int,
    experts: float,
    width: int,
    *,
    compiled: bool,
    weights: tuple[Weight, ...] = (),
) -> tuple[OpCost, ...]:
    """Cost of the grouped SwiGLU of MoE experts.

    Args:
        rows: rows of all experts of this rank.
        features: features of a token.
        inside: features inside an expert.
        experts: experts of this rank.
        width: bytes of a number.
        compiled: see :func:`d9d_nn.costs.silu_mul`.
        weights: the banks.
    """
    flops = 2 * 3 * rows * features * inside
    traffic = width * (rows * (3 * features + 3 * inside) + 3 * experts * features * inside)
    return (
        OpCost(
            "experts",
            "grouped_product",
            flops,
            2 * flops,
            traffic,
            2 * traffic,
            width * rows * features,
            rows,
            weights,
        ),
        silu_mul(rows, inside, width, compiled=compiled),
    )


def permutation(tokens: float, rows: float, features: int, width: int) -> OpCost:
    """Cost of copying tokens to rows and of their weighted sum, which keeps what the experts returned."""
    token, row = width * tokens * features, width * rows * features
    return OpCost(
        "permutation",
        "memory",
        traffic=2 * token + 2 * row,
        backward_traffic=2 * token + 5 * row,
        kept=row + 16 * rows,
    )


class Dispatch(NamedTuple):
    """Cost of what brings tokens to experts on other ranks, and back.

    Attributes:
        ops: copies around the exchanges, which all tokens that travel pass.
        exchanges, backward_exchanges: all-to-alls, as :mod:`d9d_moe.expert_parallel.communication` declares them.
        workspace: bytes of tokens that leave and arrive at once.
    """

    ops: tuple[OpCost, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    workspace: float = 0.0


def dispatch(tokens: float, experts: int, per_token: int, features: int, ranks: int, width: int) -> Dispatch:
    """Cost of a MoE dispatch by all-to-all: a token travels once to each rank with experts of it, and a sum returns.

    The time in which the host waits for the numbers of rows is not counted.

    Args:
        tokens: tokens of this rank.
        experts: experts of all ranks.
        per_token: experts of a token.
        features: features of a token.
        ranks: ranks of ``ep``.
        width: bytes of a number.
    """
    if ranks == 1:
        return Dispatch()
    elsewhere = math.comb(experts - experts // ranks, per_token) / math.comb(experts, per_token)
    travelling, wide = tokens * ranks * (1 - elsewhere), max(width, _FLOAT32)
    token, sent = width * tokens * features, width * travelling * features
    # Tokens are copied to rows that leave, as many as there may be, and those that return are summed; rows that arrived
    # are read by the permutation in place of the rank's own tokens, and its sums are written for them.
    leaving = token * min(ranks, per_token)
    moved = 2 * (token + sent) + 2 * (sent - token)
    counts = Exchange("all_to_all", "ep", float(_COUNT * (ranks + experts)))
    rows = Exchange("all_to_all", "ep", sent)
    labels = Exchange("all_to_all", "ep", travelling * 2 * per_token * wide)
    weights = Exchange("all_to_all", "ep", travelling * per_token * wide)
    return Dispatch(
        (OpCost("travelling tokens", "memory", traffic=moved + leaving - sent, backward_traffic=moved),),
        (counts, rows, labels, rows),
        (rows, rows, weights),
        leaving + sent,
    )

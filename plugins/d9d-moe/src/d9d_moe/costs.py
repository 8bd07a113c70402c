"""Costs of mixtures of experts, for cost descriptions of models. Imports no torch.

Tokens are taken to be spread evenly over experts. All sizes are those of one rank.
"""

from __future__ import annotations

from d9d_core.extend import Exchange, OpCost, Weight
from d9d_nn.costs import silu_mul

_FLOAT32 = 4


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
    """Cost of SwiGLU experts.

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


def dispatch(tokens: float, per_token: int, features: int, ranks: int, width: int) -> tuple[Exchange, ...]:
    """All-to-alls that bring tokens to experts and back; a token travels once to each rank that has experts of it.

    Args:
        tokens: tokens of this rank.
        per_token: experts of a token.
        features: features of a token.
        ranks: ranks of ``ep``.
        width: bytes of a number.
    """
    if ranks == 1:
        return ()
    reached = ranks * (1 - (1 - 1 / ranks) ** per_token)
    one = Exchange("all_to_all", "ep", width * tokens * reached * features)
    return (one, one)

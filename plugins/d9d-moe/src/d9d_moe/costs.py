"""Costs of mixtures of experts, for cost descriptions of models. Imports no torch.

All experts are assumed to get the same number of tokens. All sizes are per rank.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from d9d_core.cost import Exchange, OpCost, Share, Weight
from d9d_core.errors import BuildError
from d9d_nn.costs import silu_mul
from d9d_nn.decoder.costs import FeedForwardCost

_FLOAT32 = 4
#: Bytes of a row count. Each rank receives the number of its rows, and the number for each of its experts.
_COUNT = 8


def router(
    rows: float, features: int, experts: int, width: int, *, weights: tuple[Weight, ...] = ()
) -> tuple[OpCost, ...]:
    """Cost of a top-k router: scores in float32, softmax and selection."""
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
    """Cost of the grouped SwiGLU of a rank's experts.

    Args:
        rows: number of rows of all experts on this rank.
        features: number of features of a token.
        inside: number of features inside an expert.
        experts: number of experts on this rank.
        width: bytes of a number.
        compiled: whether the gate is compiled; its output is then recomputed in the backward instead of kept.
        weights: stacked weights of the experts.
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
    """Cost of copying tokens to rows and of their weighted sum, which keeps the experts' outputs for the backward."""
    token, row = width * tokens * features, width * rows * features
    return OpCost(
        "permutation",
        "memory",
        traffic=2 * token + 2 * row,
        backward_traffic=2 * token + 5 * row,
        kept=row + 16 * rows,
    )


class Dispatch(NamedTuple):
    """Cost of sending tokens to experts on other ranks, and back.

    Attributes:
        ops: copies of the sent tokens before and after the exchanges.
        exchanges, backward_exchanges: all-to-alls, as :mod:`d9d_moe.expert_parallel.communication` declares them.
        workspace: bytes of the sent and received tokens held at the same time.
    """

    ops: tuple[OpCost, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    backward_exchanges: tuple[Exchange, ...] = ()
    workspace: float = 0.0


def dispatch(tokens: float, experts: int, per_token: int, features: int, ranks: int, width: int) -> Dispatch:
    """Cost of an all-to-all dispatch: each token is sent once to each rank of its experts, and a sum is sent back.

    The time that the host waits for the row counts is not included.

    Args:
        tokens: number of tokens of this rank.
        experts: number of experts of all ranks.
        per_token: number of experts of a token.
        features: number of features of a token.
        ranks: number of ranks of ``ep``.
        width: bytes of a number.
    """
    if ranks == 1:
        return Dispatch()
    elsewhere = math.comb(experts - experts // ranks, per_token) / math.comb(experts, per_token)
    travelling, wide = tokens * ranks * (1 - elsewhere), max(width, _FLOAT32)
    token, sent = width * tokens * features, width * travelling * features
    # ``leaving``: largest size in bytes of the rows to send. ``moved``: bytes read and written to copy tokens to rows
    # and to sum the returned rows; and the bytes that the permutation moves in addition, because it copies received
    # rows instead of this rank's tokens.
    leaving = token * min(ranks, per_token)
    moved = 2 * (token + sent) + 2 * (sent - token)
    counts = Exchange("all_to_all", "ep", float(_COUNT * (ranks + experts)))
    rows = Exchange("all_to_all", "ep", sent)
    labels = Exchange("all_to_all", "ep", travelling * 2 * per_token * wide)
    weights = Exchange("all_to_all", "ep", travelling * per_token * wide)
    return Dispatch(
        (OpCost("sent tokens", "memory", traffic=moved + leaving - sent, backward_traffic=moved),),
        (counts, rows, labels, rows),
        (rows, rows, weights),
        leaving + sent,
    )


def mixture(share: Share, hidden: int, inside: int, experts: int, per_token: int) -> FeedForwardCost:
    """Cost of the router and the experts of a decoder layer, whose name in the layer is ``ffn``; no shared expert.

    Args:
        share: sizes of one rank's part of the model and of the batch.
        hidden: number of features of a token.
        inside: number of features inside an expert.
        experts: number of experts of the layer.
        per_token: number of experts of a token.

    Raises:
        BuildError: the ranks of ``ep`` do not divide the experts.
    """
    if experts % share.experts:
        raise BuildError(f"mesh.ep is {share.experts}, which does not divide {experts} experts; use a divisor")
    width, own = share.width, share.tokens / share.tensor
    count, rows = experts // share.experts, own * per_token
    scores = (Weight("ffn.router.weight", (experts, hidden)),)
    shapes = {"gate_proj": (hidden, inside), "up_proj": (hidden, inside), "down_proj": (inside, hidden)}
    banks = tuple(Weight(f"ffn.experts.{name}", (count, *shape), "bank") for name, shape in shapes.items())
    sent = dispatch(own, experts, per_token, hidden, share.experts, width)
    ops = (
        OpCost("ffn input", "memory", kept=width * own * hidden),
        *router(own, hidden, experts, width, weights=scores),
        permutation(own, rows, hidden, width),
        *grouped_swiglu(rows, hidden, inside, count, width, compiled=share.compiled, weights=banks),
        *sent.ops,
    )
    return FeedForwardCost(
        "layer with experts",
        ops,
        hidden * experts,
        3 * count * hidden * inside,
        # Workspace at the peak: the experts' outputs and their gradients, gate and up, and the exchanged tokens.
        2 * width * rows * (hidden + inside) + sent.workspace,
        sent.exchanges,
        sent.backward_exchanges,
    )

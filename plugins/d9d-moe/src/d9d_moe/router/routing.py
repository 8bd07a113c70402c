"""Routing of tokens to experts: the result of a top-k router.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TopKRouting:
    """Routing by a top-k router: experts and weights of each token; a :class:`~d9d_core.traits.Routing`.

    This class is neither a tuple nor a dataclass, because FSDP's mixed precision would cast the tensors of a tuple or
    dataclass, and weights must stay in a wide dtype until outputs are summed.

    Args:
        indices: int64 [T, k], experts of each token; an expert may occur several times. The index E, one past the last
            expert, marks a dropped choice of a full expert, or padding; its weight is zero.
        weights: [T, k], factors of the experts' outputs; float32, or float64 for float64 hidden states.
        scores: [T, E] in the dtype of the weights, scores of all experts without the selection bias.
        counts: int64 [E], rows of each expert, on the device of the indices; choices with index E are not counted.
        limit: maximum number of rows of an expert, known from shapes alone; ``None`` for no limit.
        incomplete: whether some indices may be E; always true with a limit.
    """

    __slots__ = ("counts", "incomplete", "indices", "limit", "scores", "weights")

    def __init__(
        self,
        indices: Tensor,
        weights: Tensor,
        scores: Tensor,
        counts: Tensor,
        limit: int | None = None,
        *,
        incomplete: bool = False,
    ) -> None:
        self.indices = indices
        self.weights = weights
        self.scores = scores
        self.counts = counts
        self.limit = limit
        self.incomplete = incomplete or limit is not None

    @classmethod
    def of(
        cls, indices: Tensor, weights: Tensor, experts: int, limit: int | None = None, *, incomplete: bool = False
    ) -> TopKRouting:
        """Make a routing from given indices int64 [T, k], with the counts of the indices and with zero scores."""
        counts, scores = count_rows(indices, experts), weights.new_zeros(len(indices), experts)
        return cls(indices, weights, scores, counts, limit, incomplete=incomplete)


def count_rows(indices: Tensor, experts: int) -> Tensor:
    """Rows of each expert, int64 [E], from indices int64 [T, k]; choices with index E are not counted.

    The function does not use ``torch.bincount``, for which the host waits to learn the length of the result.
    """
    rows = indices.flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=rows.device)
    return counts.scatter_add(0, rows, torch.ones_like(rows))[:experts]

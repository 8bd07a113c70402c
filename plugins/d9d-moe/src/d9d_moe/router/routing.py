"""Routing of tokens to experts, the result of a top-k router.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TopKRouting:
    """Routing by a top-k router: experts and weights of each token; a :class:`~d9d_core.traits.Routing`.

    Neither a tuple nor a dataclass: FSDP's mixed precision casts the tensors that it finds in either, and weights
    stay wide up to the sum over experts.

    Args:
        indices: int64 [T, k], experts of each token; one may occur several times. E, one past the last expert, stands
            for nobody: a full expert's dropped token, or padding, whose weights are zero.
        weights: [T, k], their factors in the token's output; float32, or float64 if the hidden states are.
        scores: [T, E] in the dtype of the weights, of all experts, before any bias of the selection.
        counts: int64 [E], rows of each expert, on the device of the indices; those of nobody count nowhere.
        limit: no expert has more rows than this, known from shapes alone; ``None`` if nothing limits them.
        incomplete: whether some indices may be E, which a limit implies.
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
        """Routing from given indices int64 [T, k]: counts follow from them, scores are zeros."""
        counts, scores = count_rows(indices, experts), weights.new_zeros(len(indices), experts)
        return cls(indices, weights, scores, counts, limit, incomplete=incomplete)


def count_rows(indices: Tensor, experts: int) -> Tensor:
    """Rows of each expert, int64 [E], from indices int64 [T, k]; those of E, no expert, are left out.

    Not ``torch.bincount``, which waits for the device to learn its length.
    """
    rows = indices.flatten()
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=rows.device)
    return counts.scatter_add(0, rows, torch.ones_like(rows))[:experts]

"""Which experts each token goes to.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from torch import Tensor


class Routing:
    """A router's choice.

    Neither a tuple nor a dataclass: FSDP's mixed precision casts the tensors that it finds in either, and weights
    stay wide up to the sum over experts.

    Args:
        indices: int64 [T, k], experts of each token; one may occur several times.
        weights: [T, k], their factors in the token's output; float32, or float64 if the hidden states are.
        scores: [T, E] in the dtype of the weights, of all experts, before any bias of the selection.
    """

    __slots__ = ("indices", "scores", "weights")

    def __init__(self, indices: Tensor, weights: Tensor, scores: Tensor) -> None:
        self.indices = indices
        self.weights = weights
        self.scores = scores

"""The head of a causal language model: projection to the vocabulary, and the loss when targets are given.

Shapes: B samples, S positions, H features, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.ops import OpSlot
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.ops.linear_cross_entropy import linear_cross_entropy


class CausalLMHead(nn.Module):
    """Hidden states -> loss per token, or logits.

    The loss is computed here, not by the task, so that an op that never builds all logits can take its place.

    A tied head has no parameter: its caller passes the embedding's weight. So the parameter exists once, under one
    name, and materialising a model cannot separate the two.

    Args:
        hidden_size: H.
        vocabulary: V.
        std: standard deviation of the initial weights.
        tied: whether the caller brings the weight.
    """

    weight: nn.Parameter | None

    def __init__(self, hidden_size: int, vocabulary: int, *, std: float, tied: bool = False) -> None:
        super().__init__()
        self.std = std
        self.register_parameter("weight", None if tied else nn.Parameter(torch.empty(vocabulary, hidden_size)))
        self.linear_cross_entropy = OpSlot(
            "linear_cross_entropy", linear_cross_entropy, features=hidden_size, vocabulary=vocabulary
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std); a tied head has none."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.std)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Projection and loss in one."""
        return {"linear_cross_entropy": self.linear_cross_entropy}

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, tied_weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the loss of each token, or logits when there are no targets.

        Args:
            hidden: [B, S, H].
            targets: int64 [B, S]; -100 where nothing is predicted.
            tied_weight: [V, H], exactly if the head is tied.

        Returns:
            ``{"token_loss": float32 [B, S]}`` with targets, else ``{"logits": [B, S, V]}``.

        Raises:
            ValueError: a tied head got no weight, or an untied one got one.
        """
        if (self.weight is None) == (tied_weight is None):
            raise ValueError("pass tied_weight to a tied head, and only to a tied head")
        weight = self.weight if tied_weight is None else tied_weight
        if targets is None:
            return {"logits": functional.linear(hidden, weight)}  # type: ignore[arg-type]
        return {"token_loss": self.linear_cross_entropy(hidden, weight, targets)}

"""The token embedding."""

from __future__ import annotations

from torch import nn


class TokenEmbedding(nn.Embedding):
    """Token ids int64 [B, S] -> features [B, S, H]; weight [vocabulary, H].

    Args:
        vocabulary: number of token ids.
        features: H.
        std: standard deviation of the initial weights.
    """

    def __init__(self, vocabulary: int, features: int, *, std: float) -> None:
        self.std = std  # before the base constructor, which calls reset_parameters
        super().__init__(vocabulary, features)

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std)."""
        nn.init.normal_(self.weight, std=self.std)

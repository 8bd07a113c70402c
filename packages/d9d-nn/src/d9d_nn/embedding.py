"""Token embedding, in one piece or with a separate parameter for tokens added to the vocabulary.

Shapes: B samples, S positions, H features, V words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from d9d_core.model import SequenceShare
from d9d_core.strategy import Kind, StepShape
from torch import Tensor, nn


class TokenEmbedding(nn.Embedding):
    """Embedding of token ids int64 [B, S] as features [B, S, H]; weight [vocabulary, H].

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

    def vocabulary_weight(self) -> Tensor:
        """Weight [V, H] for the projection of a tied head: the parameter itself."""
        return self.weight


class SplitTokenEmbedding(nn.Module):
    """Token embedding with a separate parameter for the last ids, so that they can be trained alone.

    Gives the same results as a :class:`TokenEmbedding` with both weights concatenated. Each part is looked up at every
    position, so both parts always get a gradient, and the host never waits for the device.

    Args:
        vocabulary: number of token ids, V.
        added: number of last ids in the second part; less than V.
        features: H.
        std: standard deviation of the initial weights.
    """

    def __init__(self, vocabulary: int, added: int, features: int, *, std: float) -> None:
        super().__init__()
        self.first_added = vocabulary - added
        self._share: SequenceShare | None = None
        self.regular = TokenEmbedding(self.first_added, features, std=std)
        self.added = TokenEmbedding(added, features, std=std)

    def see_sequence(self, share: SequenceShare) -> None:
        """Look up only this rank's positions from now on; both parts of the weight stay unsharded."""
        self._share = share

    def forward_collectives(self, step: StepShape) -> Sequence[tuple[Kind, int | None]]:  # noqa: ARG002 - the protocol's
        """Collectives of a forward: none, because each rank looks up only its own positions."""
        return ()

    def vocabulary_weight(self) -> Tensor:
        """Weight [V, H] for the projection of a tied head: a concatenated copy of both parts."""
        return torch.cat([self.regular.weight, self.added.weight])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [B, S] to features [B, S, H], of a rank's own positions if the sequence is split."""
        if self._share is not None:
            tokens = self._share.own(tokens)
        regular = self.regular(tokens.clamp(max=self.first_added - 1))
        added = self.added((tokens - self.first_added).clamp(min=0))
        return torch.where((tokens >= self.first_added).unsqueeze(-1), added, regular)


def token_embedding(vocabulary: int, added: int, features: int, *, std: float) -> TokenEmbedding | SplitTokenEmbedding:
    """Build a token embedding; the last ``added`` token ids, if any, have a separate parameter."""
    if added:
        return SplitTokenEmbedding(vocabulary, added, features, std=std)
    return TokenEmbedding(vocabulary, features, std=std)

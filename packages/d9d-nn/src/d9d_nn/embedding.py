"""Token embedding, in one piece or with separate parameters for tokens added to the vocabulary.

Shapes: B samples, S positions, H features, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from d9d_core.errors import BuildError
from d9d_core.model import SequenceShare
from d9d_core.strategy import Kind, StepShape
from d9d_weights.hugging_face.family import vocabulary_parts
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
    """Token embedding with separate parameters for parts of the vocabulary, so that they can be trained alone.

    Gives the same results as a :class:`TokenEmbedding` with all weights concatenated. Each part is looked up at every
    position, so all parts always get a gradient, and the host never waits for the device.

    Args:
        vocabulary: number of token ids, V.
        added: number of last ids with a separate weight, which is called ``added``; or a map of names to numbers of
            ids, for several separate weights in this order. Fewer than V in all.
        features: H.
        std: standard deviation of the initial weights.

    Raises:
        BuildError: the name of a part is already an attribute of modules.
    """

    def __init__(self, vocabulary: int, added: int | Mapping[str, int], features: int, *, std: float) -> None:
        super().__init__()
        self.sizes = vocabulary_parts(vocabulary, added)
        self._share: SequenceShare | None = None
        for name, size in self.sizes.items():
            add_part(self, name, TokenEmbedding(size, features, std=std))

    def see_sequence(self, share: SequenceShare) -> None:
        """Look up only this rank's positions from now on; all parts of the weight stay unsharded."""
        self._share = share

    def forward_collectives(self, step: StepShape) -> Sequence[tuple[Kind, int | None]]:  # noqa: ARG002 - the protocol's
        """Collectives of a forward: none, because each rank looks up only its own positions."""
        return ()

    def vocabulary_weight(self) -> Tensor:
        """Weight [V, H] for the projection of a tied head: a concatenated copy of all parts."""
        return torch.cat([self.get_parameter(f"{name}.weight") for name in self.sizes])

    def forward(self, tokens: Tensor) -> Tensor:
        """Map token ids int64 [B, S] to features [B, S, H]; after :meth:`see_sequence`, of this rank's positions."""
        if self._share is not None:
            tokens = self._share.own(tokens)
        names, sizes = list(self.sizes), list(self.sizes.values())
        features: Tensor = self.get_submodule(names[0])(tokens.clamp(max=sizes[0] - 1))
        first = sizes[0]
        for name, size in zip(names[1:], sizes[1:], strict=True):
            # For the last weight, ids beyond the vocabulary are not clamped, so that its look-up raises an error.
            ids = (tokens - first).clamp(min=0, max=None if name == names[-1] else size - 1)
            features = torch.where((tokens >= first).unsqueeze(-1), self.get_submodule(name)(ids), features)
            first += size
        return features


def add_part(owner: nn.Module, name: str, part: nn.Module) -> None:
    """Add the module of a part of the vocabulary to an embedding or head.

    Raises:
        BuildError: the name is already an attribute of the module.
    """
    if hasattr(owner, name):
        raise BuildError(f"model.added_tokens: '{name}' is an attribute of modules; give the part another name")
    owner.add_module(name, part)


def token_embedding(
    vocabulary: int, added: int | Mapping[str, int], features: int, *, std: float
) -> TokenEmbedding | SplitTokenEmbedding:
    """Build a token embedding; added token ids, if any, have separate parameters."""
    if vocabulary_parts(vocabulary, added):
        return SplitTokenEmbedding(vocabulary, added, features, std=std)
    return TokenEmbedding(vocabulary, features, std=std)

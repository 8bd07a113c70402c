"""Model ``ngram``: a neural probabilistic language model (Bengio et al. 2003, section 2).

Legend: B samples, S positions, H features of a token, C tokens of context, V token ids.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from torch import Tensor, nn
from torch.nn import functional

from acme_memory.config import NgramConfig


@runtime_checkable
class HasContextLimit(Protocol):
    """Trait of a module that sees a limited number of tokens, behind the capability ``model:context_limit``."""

    def context_limit(self) -> int:
        """Number of tokens that a prediction sees, the current one included."""
        ...


class Ngram(nn.Module):
    """Two-layer network over the concatenated embeddings of the last C tokens."""

    def __init__(self, config: NgramConfig, stage: Stage) -> None:
        super().__init__()
        if stage.count > 1:
            raise BuildError(f"model: ngram has no layers to split into {stage.count} pipeline stages; remove pipeline")
        self._context = config.context
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.hidden = nn.Linear(config.context * config.hidden_size, 4 * config.hidden_size)
        self.head = nn.Linear(4 * config.hidden_size, config.vocab_size, bias=False)

    def context_limit(self) -> int:
        """Number of tokens that a prediction sees."""
        return self._context

    def forward(
        self,
        *,
        tokens: Tensor,
        positions: Tensor | None = None,  # noqa: ARG002 - the place in the concatenation encodes the order
        documents: Tensor | None = None,
        lengths: Tensor | None = None,  # noqa: ARG002 - padding comes after the tokens, which do not see it
        targets: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Predict each next token.

        Args:
            tokens: int64 [B, S].
            positions: int64 [B, S], position inside the document; unused.
            documents: int64 [B, S], index of the document; a prediction sees only its own document.
            lengths: int64 [B], number of tokens of each right-padded sample; unused.
            targets: int64 [B, S], -100 where nothing is predicted.

        Returns:
            ``token_loss`` float32 [B, S], or without targets ``logits`` [B, S, V].
        """
        x_BSH = self.embedding(tokens)
        documents = torch.zeros_like(tokens) if documents is None else documents
        seen = [_shifted(x_BSH, documents, distance) for distance in range(self._context)]
        logits_BSV = self.head(functional.gelu(self.hidden(torch.cat(seen, dim=-1))))
        if targets is None:
            return {"logits": logits_BSV}
        loss = functional.cross_entropy(logits_BSV.float().flatten(0, 1), targets.flatten(), reduction="none")
        return {"token_loss": loss.view_as(targets)}


def _shifted(x_BSH: Tensor, documents_BS: Tensor, distance: int) -> Tensor:
    """Embeddings [B, S, H] of the tokens ``distance`` positions earlier; zeros before the document."""
    length = x_BSH.shape[1]
    earlier = functional.pad(x_BSH, (0, 0, distance, 0))[:, :length]
    same = functional.pad(documents_BS, (distance, 0), value=-1)[:, :length] == documents_BS
    return torch.where(same[..., None], earlier, 0.0)

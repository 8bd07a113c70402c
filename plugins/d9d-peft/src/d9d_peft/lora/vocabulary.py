"""Low-rank updates of embeddings and heads. Shapes: V vocabulary, H features, r rank, ``...`` any leading dims."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from d9d_core.kernel import OpSlot
from d9d_nn.linear import Linear
from d9d_nn.ops.linear_cross_entropy import capped
from torch import Tensor, nn
from torch.nn import functional

from d9d_peft.lora.dropout import dropped
from d9d_peft.lora.linear import Adapted, Down, merged_weight

EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
HEAD_A, HEAD_B = "lora_head_A", "lora_head_B"


class WordFactor(nn.Module):
    """Factor of a low-rank update with a row per token of the vocabulary: weight [V, r], initially zeros."""

    def __init__(self, words: int, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(words, rank))

    def reset_parameters(self) -> None:
        """Fill the weight with zeros."""
        nn.init.zeros_(self.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Look up the rows [..., r] of tokens int64 [...]."""
        return functional.embedding(tokens, self.weight)


class FeatureFactor(Linear):
    """Second factor of an embedding's update, weight [H, r]; initialised as in the code of the LoRA authors."""

    def reset_parameters(self) -> None:
        """Draw the weight from the standard normal distribution."""
        nn.init.normal_(self.weight)


class AdaptedEmbedding(Adapted):
    """Mixin that adds LoRA without dropout to an embedding: ``W[token] + scale * B A[token]``.

    If the embedding multiplies its output by its attribute ``embed_scale``, as some of transformers do, the update is
    multiplied, too.
    """

    lora_files: ClassVar[Mapping[str, tuple[str, bool]]] = {
        f"{EMBEDDING_A}.weight": (EMBEDDING_A, True),
        f"{EMBEDDING_B}.weight": (EMBEDDING_B, False),
    }
    weight: nn.Parameter
    lora_embedding_A: WordFactor  # noqa: N815 - name of the peft library
    lora_embedding_B: FeatureFactor  # noqa: N815

    def lora_add(self, rank: int) -> None:
        """Add the factors A and B to the embedding."""
        words, features = self.weight.shape
        with torch.device(self.weight.device):
            self.lora_embedding_A = WordFactor(words, rank).to(self.weight.dtype)
            self.lora_embedding_B = FeatureFactor(rank, features, std=1.0).to(self.weight.dtype)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens int64 [...] to features [..., H]."""
        own: Tensor = super().forward(tokens)  # type: ignore[misc]
        if self.lora_off:
            return own
        term: Tensor = self.lora_embedding_B(self.lora_embedding_A(tokens)) * self.lora_scale
        factor = getattr(self, "embed_scale", None)
        if factor is not None:
            term = term * (factor.to(term.dtype) if isinstance(factor, Tensor) else factor)
        return own + term

    def lora_merged(self, weight: Tensor) -> Tensor:
        """Weight [V, H] with the update added, in the same dtype."""
        return merged_embedding(weight, self.lora_embedding_A.weight, self.lora_embedding_B.weight, self.lora_scale)


class AdaptedHead(Adapted):
    """Mixin that adds LoRA to a :class:`d9d_nn.heads.causal_lm.CausalLMHead` with its own weight.

    ``W h + s B A h`` is the product of ``[W, B]`` and ``[h, s A h]``, so the op that computes the loss without storing
    logits can be used. It needs memory for ``[W, B]``, a copy of W with r more columns, and for the gradient of it.
    """

    lora_files: ClassVar[Mapping[str, tuple[str, bool]]] = {
        f"{HEAD_A}.weight": ("lora_A.weight", False),
        f"{HEAD_B}.weight": ("lora_B.weight", False),
    }
    weight: nn.Parameter
    training: bool
    softcap: float | None
    lora_head_A: Down  # noqa: N815 - A and B as in the peft library
    lora_head_B: WordFactor  # noqa: N815
    lora_cross_entropy: OpSlot
    loss_slot: Callable[[int], OpSlot]
    of_tokens: Callable[[OpSlot, Tensor, Tensor, Tensor], dict[str, Tensor]]

    def lora_add(self, rank: int) -> None:
        """Add the factors A and B, and the op slot for the loss with r more features."""
        words, features = self.weight.shape
        with torch.device(self.weight.device):
            self.lora_head_A = Down(features, rank, std=0.0).to(self.weight.dtype)
            self.lora_head_B = WordFactor(words, rank).to(self.weight.dtype)
        self.lora_cross_entropy = self.loss_slot(features + rank)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of the head, and the op slot of the loss with the update."""
        slots: Mapping[str, OpSlot] = super().op_slots()  # type: ignore[misc]
        return {**slots, "lora_cross_entropy": self.lora_cross_entropy}

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, tied_weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the head's outputs with the low-rank update, or without it if ``lora_off`` is true.

        ``tied_weight`` is always ``None``, since only heads with a weight of their own are adapted.
        """
        if self.lora_off:
            out: dict[str, Tensor] = super().forward(hidden, targets, tied_weight)  # type: ignore[misc]
            return out
        inner = self.lora_head_A(dropped(hidden, self.lora_dropout, self.training)) * self.lora_scale
        if targets is None:
            term = functional.linear(inner, self.lora_head_B.weight)
            return {"logits": capped(functional.linear(hidden, self.weight) + term, self.softcap)}
        wide = torch.cat([hidden, inner.to(hidden.dtype)], dim=-1)
        weight = torch.cat([self.weight, self.lora_head_B.weight], dim=-1)
        return self.of_tokens(self.lora_cross_entropy, wide, weight, targets)

    def lora_merged(self, weight: Tensor) -> Tensor:
        """Weight [V, H] with the update added, in the same dtype."""
        return merged_weight(weight, self.lora_head_A.weight, self.lora_head_B.weight, self.lora_scale)


def merged_embedding(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Weight ``W + scale * A B^T`` [V, H] in the dtype of W; computed in float32 or wider."""
    return merged_weight(weight, b.T, a, scale)

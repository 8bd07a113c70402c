"""Head of a causal language model: projection to the vocabulary, and the loss when targets are given.

Shapes: B samples, S positions, H features, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from d9d_core.kernel import OpSlot
from d9d_core.model import VocabularyShare
from d9d_core.strategy import Kind, StepShape
from d9d_weights.hugging_face.family import vocabulary_parts
from torch import Tensor, nn
from torch.nn import functional

from d9d_nn.embedding import add_part
from d9d_nn.ops.linear_cross_entropy import (
    CountsRanks,
    capped,
    linear_cross_entropy,
    linear_cross_entropy_with_ranks,
    target_ranks,
)
from d9d_nn.ops.vocabulary_parallel import VocabularyParallelSlot, gather_words

#: Name of the observation that is computed only if a metric reads it: how many token ids are likelier than the target.
RANKS = "token_ranks"


class VocabularyWeight(nn.Module):
    """Rows of a causal_lm head's weight for some token ids, stored as a separate parameter.

    Args:
        words: number of these token ids.
        features: H.
        std: standard deviation of the initial weights.
    """

    def __init__(self, words: int, features: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(words, features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std)."""
        nn.init.normal_(self.weight, std=self.std)


class CausalLMHead(nn.Module):
    """Causal language-modelling head: maps hidden states to a loss per token, or to logits.

    The head computes the loss, not the task, so that an op that never allocates all logits can compute it.

    A tied head has no parameter: its caller passes the embedding's weight. The parameter therefore exists once, under
    one name, and stays shared when the model is materialised from the meta device.

    A head with added tokens has a parameter for each part, such as ``regular.weight`` and ``added.weight``, and
    concatenates them in each call: one copy of V x H numbers forward, and one more for their gradient.

    Args:
        hidden_size: H.
        vocabulary: V.
        std: standard deviation of the initial weights.
        tied: whether the caller passes the weight.
        added_tokens: last token ids with separate parameters, see :class:`~d9d_nn.embedding.SplitTokenEmbedding`.
        softcap: soft cap of the logits, see :func:`~d9d_nn.ops.linear_cross_entropy.linear_cross_entropy`.

    Raises:
        BuildError: the name of a part is already an attribute of modules.
    """

    weight: nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        vocabulary: int,
        *,
        std: float,
        tied: bool = False,
        added_tokens: int | Mapping[str, int] = 0,
        softcap: float | None = None,
    ) -> None:
        super().__init__()
        self.std, self.tied, self.vocabulary, self.softcap = std, tied, vocabulary, softcap
        self._parts = {} if tied else vocabulary_parts(vocabulary, added_tokens)
        self.split = bool(self._parts)
        whole = not tied and not self.split
        self.register_parameter("weight", nn.Parameter(torch.empty(vocabulary, hidden_size)) if whole else None)
        for name, words in self._parts.items():
            add_part(self, name, VocabularyWeight(words, hidden_size, std=std))
        self.linear_cross_entropy = self.loss_slot(hidden_size, ["vocabulary_parallel_cross_entropy"])
        self._ranked: set[str] = set()
        self._share: VocabularyShare | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight from N(0, std); a tied head or a head with added tokens has no own weight."""
        if self.weight is not None:
            nn.init.normal_(self.weight, std=self.std)

    def loss_slot(self, features: int, instead: Sequence[str] = ()) -> OpSlot:
        """Make a slot of the op that computes projection and loss, with this head's vocabulary and soft cap.

        Args:
            features: number of features of the hidden states.
            instead: ops that a strategy may put in place of the op; see :class:`~d9d_core.kernel.OpSlot`.
        """
        facts: dict[str, Any] = {"features": features, "vocabulary": self.vocabulary}
        if self.softcap is None:
            return OpSlot("linear_cross_entropy", linear_cross_entropy, instead=instead, **facts)
        # With a cap, the op has another name, so that no backend can ignore the cap.
        return OpSlot("capped_linear_cross_entropy", partial(linear_cross_entropy, softcap=self.softcap), **facts)

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Slot of the op that computes projection and loss, such as ``linear_cross_entropy``."""
        return {"linear_cross_entropy": self.linear_cross_entropy}

    def on_demand(self) -> Collection[str]:
        """Observation ``token_ranks``; see :func:`d9d_nn.ops.linear_cross_entropy.linear_cross_entropy_with_ranks`."""
        return (RANKS,)

    def observe(self, name: str, when: Literal["training", "evaluation"]) -> None:
        """Compute the observation ``token_ranks`` from now on, either in training or in forwards in ``eval`` mode."""
        if name == RANKS:
            self._ranked.add(when)

    def split_vocabulary(self, share: VocabularyShare) -> None:
        """Compute with this rank's rows of the weight; losses, token ranks and logits still cover the whole vocabulary.

        From now on, calls are collective over the process group that shares the vocabulary.
        """
        self._share = share
        self.linear_cross_entropy = VocabularyParallelSlot(share, self.softcap)

    def forward_collectives(self, step: StepShape) -> Iterator[tuple[Kind, int | None]]:
        """All-reduces of a loss with a sharded vocabulary: of logit maxima, of sums, and of token ranks if computed."""
        wide = max(step.itemsize, 4)
        yield "all_reduce", step.bytes_of(1, wide)
        yield "all_reduce", step.bytes_of(3, wide)
        if "training" in self._ranked:
            yield "all_reduce", step.bytes_of(1, 8)

    def forward(
        self, hidden: Tensor, targets: Tensor | None = None, tied_weight: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Compute the loss of each token, or logits when there are no targets.

        Args:
            hidden: [B, S, H].
            targets: int64 [B, S]; -100 where nothing is predicted.
            tied_weight: [V, H], or this rank's rows of it; given if and only if the head is tied.

        Returns:
            ``{"token_loss": float32 [B, S]}`` with targets, and ``"token_ranks"`` int64 [B, S] if requested; else
            ``{"logits": [B, S, V]}``.

        Raises:
            ValueError: a tied head got no ``tied_weight``, or an untied head got a ``tied_weight``.
        """
        if self.tied == (tied_weight is None):
            raise ValueError("pass tied_weight to a tied head, and only to a tied head")
        weight = self._own_weight() if tied_weight is None else self._own_words(tied_weight)
        if targets is None:
            logits = capped(functional.linear(hidden, weight), self.softcap)
            return {"logits": logits if self._share is None else gather_words(logits, self.vocabulary, self._share)}
        return self.of_tokens(self.linear_cross_entropy, hidden, weight, targets)

    def of_tokens(self, slot: OpSlot, hidden: Tensor, weight: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the loss of each token by the op of a slot, and ``token_ranks`` if a metric reads them."""
        if ("training" if self.training else "evaluation") not in self._ranked:
            return {"token_loss": slot(hidden, weight, targets)}
        if isinstance(slot.function, CountsRanks):
            loss, ranks = slot.function.with_ranks(hidden, weight, targets)
        elif slot.backend == "reference":
            loss, ranks = linear_cross_entropy_with_ranks(hidden, weight, targets, softcap=self.softcap)
        else:  # the backend cannot count ranks: recompute the logits
            loss, ranks = slot(hidden, weight, targets), target_ranks(hidden, weight, targets)
        return {"token_loss": loss, RANKS: ranks}

    def _own_words(self, weight: Tensor) -> Tensor:
        """This rank's rows of a tied weight; the embedding may have all rows."""
        if self._share is None or len(weight) == self._share.size:
            return weight
        return weight.narrow(0, self._share.first, self._share.size)

    def _own_weight(self) -> Tensor:
        if self.weight is not None:
            return self.weight
        return torch.cat([self.get_parameter(f"{name}.weight") for name in self._parts])

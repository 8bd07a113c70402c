"""Protocols of balancers, and the values of the router that they read.

Shapes: B samples, T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from d9d_core.traits import LossTerm
from torch import Tensor

#: Number added to the sum of a token's scores: avoids 0 / 0 if all scores underflowed, and changes no other sum.
TINY = 1e-20


class Choice(NamedTuple):
    """Choice of a router, as balancers read it: logits, scores and chosen experts of a microbatch.

    Attributes:
        logits: [T, E], float32 or wider.
        scores: [T, E], without the selection bias.
        indices: int64 [T, k], chosen experts, including dropped choices; E for padding.
        samples: B; the tokens are B samples of equal length, one after another.
        padding: bool [T], padded positions, which are not counted; ``None`` if there is no padding.
    """

    logits: Tensor
    scores: Tensor
    indices: Tensor
    samples: int
    padding: Tensor | None = None

    def shares(self) -> Tensor:
        """Scores [T, E] normalised to a sum of one per token, like softmax scores; zeros for padding."""
        shares = self.scores / (self.scores.sum(dim=-1, keepdim=True) + TINY)
        return shares if self.padding is None else shares.masked_fill(self.padding.unsqueeze(1), 0)

    def rows(self, parts: int) -> Tensor:
        """Number of choices of each expert in each of ``parts`` equal consecutive parts of the tokens: [parts, E]."""
        experts = self.scores.shape[1]
        chosen = self.indices.reshape(parts, self.indices.numel() // max(parts, 1))
        # The last column is for padding.
        counts = torch.zeros(parts, experts + 1, dtype=self.scores.dtype, device=chosen.device)
        return counts.scatter_add(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))[:, :experts]

    def lengths(self) -> Tensor | int:
        """Number of positions of each sample without padding, int64 [B]; a single int if there is no padding."""
        length = len(self.scores) // max(self.samples, 1)
        return length if self.padding is None else self.padding.logical_not().view(self.samples, length).sum(dim=1)

    def positions(self) -> Tensor | int:
        """Number of positions without padding, int64 0-d; an int if there is no padding."""
        return len(self.scores) if self.padding is None else self.padding.logical_not().sum()


@runtime_checkable
class BalancingLoss(Protocol):
    """Protocol of balancing losses of a router."""

    @property
    def term(self) -> str:
        """Name of the term among the losses of the job; a valid attribute name."""
        ...

    @property
    def layout_invariant(self) -> bool:
        """Whether the loss of a batch does not depend on its division into microbatches and over ranks."""
        ...

    def loss_term(self) -> LossTerm:
        """Coefficient of the loss term, and the unit (such as samples or positions) over which the loss is averaged."""
        ...

    def total(self, choice: Choice) -> Tensor:
        """Loss summed over the microbatch, 0-d, with gradients to the scores or logits."""
        ...


@runtime_checkable
class BiasUpdate(Protocol):
    """Protocol of updates of a router's selection bias, once per optimizer step."""

    @property
    def layout_invariant(self) -> bool:
        """Whether the new bias does not depend on the division of the batch into microbatches and over ranks."""
        ...

    def moved(self, bias: Tensor, counts: Tensor) -> Tensor:
        """New bias, float32 [E], from the current bias and the rows of each expert in the step, int64 [E]."""
        ...


Balancer = BalancingLoss | BiasUpdate

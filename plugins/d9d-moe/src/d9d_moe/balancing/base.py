"""Protocols of balancers, and the router's values that they see.

Shapes: B samples, T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from d9d_core.traits import LossTerm
from torch import Tensor

#: Keeps a sum of scores that all underflowed from dividing zero by zero; too small to change any other sum.
TINY = 1e-20


class Choice(NamedTuple):
    """Choice of a router that a balancer is shown: logits, scores and chosen experts of a microbatch.

    Attributes:
        logits: [T, E], float32 or wider.
        scores: [T, E], before any bias of the selection.
        indices: int64 [T, k], the chosen experts, before any is dropped for want of capacity; E for padding.
        samples: B, number of samples of equal length that the tokens are, one after the other.
        padding: bool [T], positions that count nowhere; ``None`` if there are none.
    """

    logits: Tensor
    scores: Tensor
    indices: Tensor
    samples: int
    padding: Tensor | None = None

    def shares(self) -> Tensor:
        """Scores [T, E] normalised to a sum of one per token, as softmax scores are; zeros for padding."""
        shares = self.scores / (self.scores.sum(dim=-1, keepdim=True) + TINY)
        return shares if self.padding is None else shares.masked_fill(self.padding.unsqueeze(1), 0)

    def rows(self, parts: int) -> Tensor:
        """Times that each of ``parts`` equal parts of the tokens chose each expert, [parts, E] as the scores."""
        experts = self.scores.shape[1]
        chosen = self.indices.reshape(parts, self.indices.numel() // max(parts, 1))
        # The last place is nobody's: for padding.
        counts = torch.zeros(parts, experts + 1, dtype=self.scores.dtype, device=chosen.device)
        return counts.scatter_add(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))[:, :experts]

    def lengths(self) -> Tensor | int:
        """Positions of each sample that are no padding, int64 [B]; without padding the number that all have."""
        length = len(self.scores) // max(self.samples, 1)
        return length if self.padding is None else self.padding.logical_not().view(self.samples, length).sum(dim=1)

    def positions(self) -> Tensor | int:
        """Number of positions that are no padding, int64 0-d; known to the host without padding."""
        return len(self.scores) if self.padding is None else self.padding.logical_not().sum()


@runtime_checkable
class BalancingLoss(Protocol):
    """Base of balancing losses of a router: their contract."""

    @property
    def term(self) -> str:
        """Name of the term among the losses of the job, a valid attribute name."""
        ...

    @property
    def layout_invariant(self) -> bool:
        """Whether the loss of a batch is the same, however the batch is cut and spread over ranks."""
        ...

    def loss_term(self) -> LossTerm:
        """Coefficient of the term, and what it is a mean over."""
        ...

    def total(self, choice: Choice) -> Tensor:
        """Sum over the microbatch, 0-d, with a graph to the scores or logits."""
        ...


@runtime_checkable
class BiasUpdate(Protocol):
    """Update of the bias of a router's selection, once per optimizer step."""

    @property
    def layout_invariant(self) -> bool:
        """Whether the new bias is the same, however the batch was cut and spread."""
        ...

    def moved(self, bias: Tensor, counts: Tensor) -> Tensor:
        """New bias, float32 [E], from the present one and the rows of each expert in the step, int64 [E]."""
        ...


Balancer = BalancingLoss | BiasUpdate

"""Protocols of balancers, and the router's values that they see.

Shapes: T tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from d9d_core.extend import LossTerm
from torch import Tensor

#: Keeps a sum of scores that all underflowed from dividing zero by zero; too small to change any other sum.
TINY = 1e-20


class Choice(NamedTuple):
    """Logits, scores and chosen experts of a microbatch.

    Attributes:
        logits: [T, E], float32 or wider.
        scores: [T, E], before any bias of the selection.
        indices: int64 [T, k], the chosen experts, before any is dropped for want of capacity.
        samples: number of samples of equal length that the tokens are, one after the other.
    """

    logits: Tensor
    scores: Tensor
    indices: Tensor
    samples: int

    def shares(self) -> Tensor:
        """Scores [T, E] normalised to a sum of one per token, as softmax scores are."""
        return self.scores / (self.scores.sum(dim=-1, keepdim=True) + TINY)


@runtime_checkable
class BalancingLoss(Protocol):
    """Balancing loss of a router: its contract."""

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

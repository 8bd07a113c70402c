"""Loss terms that make a router spread its tokens, or keep its logits small.

Shapes: B samples, S positions, T = B * S tokens, E experts, k experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from d9d_core.extend import LossTerm
from torch import Tensor

from d9d_moe.balancing.base import Choice


@dataclass(frozen=True)
class SequenceBalance:
    """``sum_i f_i P_i`` of each sample: 1 if all experts get the same, E / k if all tokens choose the same.

    f_i = E / (k S) * (how often the sample chose expert i); P_i is the mean of expert i's normalised scores:
    DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20. What was chosen counts, which a bias or groups may move away
    from the k best scores of equation 18.

    Layout invariant as long as a sample is whole on a rank: of samples whose positions ranks share, each part is
    balanced for itself.
    """

    coefficient: float
    term: ClassVar[str] = "router_balance"
    layout_invariant: ClassVar[bool] = True

    def loss_term(self) -> LossTerm:
        """A mean over samples."""
        return LossTerm(self.coefficient, per="sample")

    def total(self, choice: Choice) -> Tensor:
        """The sum over samples."""
        samples, (tokens, experts), top_k = choice.samples, choice.scores.shape, choice.indices.shape[1]
        length = tokens // max(samples, 1)
        chosen = choice.indices.reshape(samples, length * top_k)
        counts = torch.zeros(samples, experts, dtype=choice.scores.dtype, device=chosen.device)
        counts = counts.scatter_add(1, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        shares = choice.shares().reshape(samples, length, experts).sum(dim=1)
        return (counts * shares).sum() * (experts / max(top_k * length * length, 1))


@dataclass(frozen=True)
class BatchBalance:
    """``E * sum_i f_i P_i`` over the tokens of a microbatch: 1 if all experts get the same.

    f_i is the fraction of choices that expert i got, P_i the mean of its normalised scores. Fedus et al. 2021, "Switch
    Transformers", equations 4 to 6, for k = 1; over k choices as a fraction of all of them, so that the value does not
    grow with k. Transformers' ``router_aux_loss_coef`` is for k times this value, over all
    layers at once instead of their sum.

    Samples may differ from each other as long as the microbatch is balanced. So the loss depends on which samples share
    a microbatch and a rank: not layout invariant.
    """

    coefficient: float
    term: ClassVar[str] = "router_balance"
    layout_invariant: ClassVar[bool] = False

    def loss_term(self) -> LossTerm:
        """A mean over microbatches, by their positions."""
        return LossTerm(self.coefficient, per="position")

    def total(self, choice: Choice) -> Tensor:
        """T times the value."""
        experts, chosen = choice.scores.shape[1], choice.indices.flatten()
        counts = torch.zeros(experts, dtype=choice.scores.dtype, device=chosen.device)
        counts = counts.scatter_add(0, chosen, torch.ones_like(chosen, dtype=counts.dtype))
        return (counts * choice.shares().sum(dim=0)).sum() * (experts / max(len(chosen), 1))


@dataclass(frozen=True)
class ZLoss:
    """The mean of ``logsumexp(logits) ** 2``, which keeps logits small, where rounding matters less.

    Zoph et al. 2022, "ST-MoE", equation 5.
    """

    coefficient: float
    term: ClassVar[str] = "router_z"
    layout_invariant: ClassVar[bool] = True

    def loss_term(self) -> LossTerm:
        """A mean over positions."""
        return LossTerm(self.coefficient, per="position")

    def total(self, choice: Choice) -> Tensor:
        """The sum over positions."""
        return choice.logits.logsumexp(dim=-1).square().sum()

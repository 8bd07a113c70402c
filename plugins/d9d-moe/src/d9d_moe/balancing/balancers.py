"""Balancers of a router: loss terms for an even load or for small logits, and a bias update without a loss.

Shapes: B samples, S positions, T = B * S tokens, E experts, k experts of a token. Padding is not counted: S and T are
without padding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from d9d_core.traits import LossTerm
from torch import Tensor

from d9d_moe.balancing.base import Balancer, Choice
from d9d_moe.balancing.config import AuxiliaryLossConfig, BiasUpdateConfig, ZLossConfig


@dataclass(frozen=True)
class SequenceBalance:
    """Sequence balancer: balancing loss ``sum_i f_i P_i`` per sample; 1 if all experts are used equally, at most E / k.

    f_i = E / (k S) * (number of tokens of the sample that chose expert i); P_i is the mean of expert i's normalised
    scores: DeepSeek-AI 2024, "DeepSeek-V3", equations 17 to 20. f_i counts the experts actually chosen, which may
    differ from the k best scores of equation 18 because of a bias or of groups.

    The loss does not depend on the layout: if ranks share the positions of a sample, the router gathers all choices.
    """

    coefficient: float
    term: ClassVar[str] = "router_balance"
    layout_invariant: ClassVar[bool] = True

    def loss_term(self) -> LossTerm:
        """Describe the loss term, which is averaged over samples."""
        return LossTerm(self.coefficient, per="sample")

    def total(self, choice: Choice) -> Tensor:
        """Loss summed over samples."""
        samples, (tokens, experts), top_k = choice.samples, choice.scores.shape, choice.indices.shape[1]
        shares = choice.shares().reshape(samples, tokens // max(samples, 1), experts).sum(dim=1)
        balance = (choice.rows(samples) * shares).sum(dim=1)
        return (balance / _at_least_one(choice.lengths()) ** 2).sum() * (experts / top_k)


@dataclass(frozen=True)
class BatchBalance:
    """Batch balancer: balancing loss ``E * sum_i f_i P_i`` per microbatch; 1 if all experts are used equally.

    f_i is the fraction of all choices that went to expert i, P_i the mean of its normalised scores. Fedus et al. 2021,
    "Switch Transformers", equations 4 to 6, for k = 1; with k choices, f_i is a fraction of all k T choices, so the
    value does not grow with k. Transformers' ``router_aux_loss_coef`` multiplies k times this value, computed over all
    layers at once instead of summed over layers.

    Single samples may be unbalanced as long as the microbatch is balanced. The loss therefore depends on the layout,
    which decides which samples share a microbatch and a rank.
    """

    coefficient: float
    term: ClassVar[str] = "router_balance"
    layout_invariant: ClassVar[bool] = False

    def loss_term(self) -> LossTerm:
        """Describe the loss term, an average over microbatches, weighted by their numbers of positions."""
        return LossTerm(self.coefficient, per="position")

    def total(self, choice: Choice) -> Tensor:
        """Loss of the microbatch times T, the number of its positions without padding."""
        experts, top_k = choice.scores.shape[1], choice.indices.shape[1]
        balance = (choice.rows(1)[0] * choice.shares().sum(dim=0)).sum()
        return balance / _at_least_one(choice.positions()) * (experts / top_k)


@dataclass(frozen=True)
class ZLoss:
    """Router z-loss ``logsumexp(logits) ** 2``: keeps the logits small, so that their rounding errors are small.

    Zoph et al. 2022, "ST-MoE", equation 5.
    """

    coefficient: float
    term: ClassVar[str] = "router_z"
    layout_invariant: ClassVar[bool] = True

    def loss_term(self) -> LossTerm:
        """Describe the loss term, which is averaged over positions."""
        return LossTerm(self.coefficient, per="position")

    def total(self, choice: Choice) -> Tensor:
        """Loss summed over positions."""
        squares = choice.logits.logsumexp(dim=-1).square()
        return (squares if choice.padding is None else squares.masked_fill(choice.padding, 0)).sum()


@dataclass(frozen=True)
class SignUpdate:
    """Bias update ``b_i += rate * sign(mean load - load_i)``: raises experts below the mean load by a fixed step.

    Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", algorithm 1.
    """

    rate: float
    layout_invariant: ClassVar[bool] = True

    def moved(self, bias: Tensor, counts: Tensor) -> Tensor:
        """Return the new bias. Loads are compared as integers: an expert with exactly the mean load keeps its bias."""
        return bias + self.rate * (counts.sum() - counts * len(counts)).sign()


def _at_least_one(number: Tensor | int) -> Tensor | int:
    """Clamp a divisor to at least 1, for quotients whose dividend is zero where the divisor is 0."""
    return number.clamp(min=1) if isinstance(number, Tensor) else max(number, 1)


def build_balancers(chosen: Iterable[AuxiliaryLossConfig | ZLossConfig | BiasUpdateConfig]) -> tuple[Balancer, ...]:
    """Build the balancers that :class:`d9d_moe.router.top_k.TopKRouter` takes as ``balancing``."""
    return tuple(_balancer(config) for config in chosen)


def _balancer(config: AuxiliaryLossConfig | ZLossConfig | BiasUpdateConfig) -> Balancer:
    if isinstance(config, BiasUpdateConfig):
        return SignUpdate(config.rate)
    if isinstance(config, ZLossConfig):
        return ZLoss(config.coefficient)
    kind = SequenceBalance if config.scope == "sequence" else BatchBalance
    return kind(config.coefficient)

"""Top-k router: chooses the k experts with the best scores.

Shapes: T tokens, H features, E experts, k experts of a token, G groups of E/G consecutive experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from d9d_core.errors import BuildError
from d9d_core.model import ContextShare, SequenceShare
from d9d_core.strategy import ContextCall, Kind, StepShape
from d9d_core.tensors import wide_dtype
from torch import Tensor, nn
from torch.nn import functional

from d9d_moe.balancing.balanced_router import BalancedRouter
from d9d_moe.balancing.base import TINY, Balancer, Choice
from d9d_moe.router.logits import bfloat16_logits
from d9d_moe.router.routing import TopKRouting, count_rows
from d9d_moe.router.selection import best, keep_best_groups, over_capacity


class TopKRouter(BalancedRouter):
    """Top-k router with scores ``s = softmax(W h)`` or ``sigmoid(W h)``, which are the weights of the k best experts.

    Sources. Softmax over all experts, then the k best: Fedus et al. 2021, "Switch Transformers", equations 1 and 2, for
    k = 1; weights renormalised to a sum of one: Qwen3-MoE, Mixtral. Sigmoid, groups, renormalisation and scale:
    DeepSeek-AI 2024, "DeepSeek-V3", equations 12 to 16. A bias for the selection only: Wang et al. 2024,
    "Auxiliary-Loss-Free Load Balancing", equation 3.

    Logits and scores are computed in float32 or wider, also under autocast, because bfloat16 cannot distinguish experts
    with close scores. Among equal scores, the expert with the lower index is chosen, on every device.

    Args:
        hidden_size: H.
        experts: E.
        top_k: k.
        std: initial standard deviation of W.
        scoring: function from logits to scores.
        renormalise: divide a token's weights by their sum.
        scale: factor of the weights, at the end.
        groups: G; experts are chosen from the best groups only, which limits the nodes that a token is sent to.
        top_groups: number of groups that a token may use; required if there is more than one group.
        selection_bias: keep a buffer float32 [E] of this name, initially zeros, which is added to the scores for the
            selection but not for the weights. The buffer also exists if a balancer updates it.
        balancing: balancers of the router; see :mod:`d9d_moe.balancing`.
        capacity: an expert takes at most ``ceil(capacity * T * k / E)`` rows of this rank's microbatch, T without
            padding; further rows are dropped (:func:`~d9d_moe.router.selection.over_capacity`), after weights were
            renormalised. Which rows are dropped depends on the layout, because the layout determines which samples
            share a microbatch and a rank.

    Raises:
        BuildError: the numbers of experts, choices and groups, or the balancers, do not fit together.
    """

    def __init__(
        self,
        hidden_size: int,
        experts: int,
        top_k: int,
        *,
        std: float,
        scoring: Literal["softmax", "sigmoid"] = "softmax",
        renormalise: bool = True,
        scale: float = 1.0,
        groups: int = 1,
        top_groups: int | None = None,
        selection_bias: bool = False,
        balancing: Sequence[Balancer] = (),
        capacity: float | None = None,
    ) -> None:
        super().__init__(experts, balancing, selection_bias=selection_bias, drops=capacity is not None)
        _check(experts, top_k, scoring, groups, top_groups, capacity)
        self.top_k = top_k
        self.std = std
        self.scoring = scoring
        self.renormalise = renormalise
        self.scale = scale
        self.groups = groups
        self.top_groups = top_groups or groups
        self.capacity = capacity
        self._share: SequenceShare | None = None
        self._context: ContextShare | None = None
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W from N(0, std ** 2); set the buffers to zero."""
        nn.init.normal_(self.weight, std=self.std)
        self.reset_buffers()

    def layout_dependence(self) -> Sequence[str]:
        """Describe the settings whose result depends on the division of a batch into microbatches and over ranks."""
        dropping = [] if self.capacity is None else ["capacity drops tokens of each microbatch on each rank separately"]
        return [*super().layout_dependence(), *dropping]

    def see_sequence(self, share: SequenceShare) -> None:
        """Route only this rank's positions under ``tp``; losses, tallies and capacity cover all positions."""
        self._share = share

    def forward_collectives(self, step: StepShape) -> Sequence[tuple[Kind, int | None]]:
        """Collective of a router that routes only this rank's positions: the all-gather of logits [B, S, E]."""
        return [("all_gather", step.bytes_of(self.experts, max(step.itemsize, 4)))]

    def see_context(self, share: ContextShare) -> None:
        """Route only this rank's positions under ``cp``; losses cover all positions, tallies and capacity do not."""
        self._context = share

    def context_collectives(self, step: StepShape) -> Sequence[ContextCall]:
        """Collectives of losses over samples whose positions are split over ``cp``; no collectives without losses."""
        return self.collectives_everywhere(step, self._context, self.top_k)

    def forward(self, tokens: Tensor, samples: int = 1, padding: Tensor | None = None) -> TopKRouting:
        """Choose the experts of each token.

        Args:
            tokens: [T, H], positions of all samples, one sample after another.
            samples: number of samples of equal length in ``tokens``.
            padding: bool [T], positions to send to no expert and not to count; ``None`` if there is no padding. Covers
                all positions, even if ``tokens`` are only this rank's positions under ``tp``.

        Returns:
            Indices and weights [T, k], best first.
        """
        logits = self._logits(tokens)
        if self._share is not None:
            logits = self._share.gather(logits.view(samples, -1, self.experts)).flatten(0, 1)
        scores = self._scores(logits)
        indices = self._select(scores.detach())
        weights = scores.gather(1, indices)
        if self.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + TINY)
        if padding is not None:
            absent = padding.unsqueeze(1)
            indices, weights = indices.masked_fill(absent, self.experts), weights.masked_fill(absent, 0)
        choice = Choice(logits, scores, indices, samples, padding)
        weights, limit = (
            self.add_auxiliary_losses(weights * self.scale, self.everywhere(choice, self._context, self._scores)),
            None,
        )
        if self.capacity is not None:
            limit = math.ceil(self.capacity * indices.numel() / self.experts)  # counts padding, so the host knows it
            late = over_capacity(indices, self._taken(choice.positions()))
            indices, weights = indices.masked_fill(late, self.experts), weights.masked_fill(late, 0)
        counts = count_rows(indices, self.experts)
        self.tally(choice, counts)
        if self._share is not None:
            whole = (tensor.view(samples, -1, tensor.shape[1]) for tensor in (indices, weights, scores))
            indices, weights, scores = (self._share.own(tensor).flatten(0, 1) for tensor in whole)
            counts = count_rows(indices, self.experts)
        return TopKRouting(indices, weights, scores, counts, limit, incomplete=padding is not None)

    def _taken(self, positions: Tensor | int) -> Tensor | int:
        """Capacity of an expert, in rows, for a microbatch with this number of positions without padding."""
        assert self.capacity is not None
        if isinstance(positions, int):
            return math.ceil(self.capacity * (positions * self.top_k) / self.experts)
        rows = (positions * self.top_k).to(wide_dtype(positions.device))
        return (self.capacity * rows / self.experts).ceil()

    def _logits(self, tokens: Tensor) -> Tensor:
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        if tokens.is_meta:  # meta has no autocast
            return functional.linear(tokens.to(dtype), self.weight.to(dtype))
        with torch.autocast(tokens.device.type, enabled=False):
            if tokens.is_cuda and tokens.dtype == self.weight.dtype == torch.bfloat16:
                return bfloat16_logits(tokens, self.weight)
            return functional.linear(tokens.to(dtype), self.weight.to(dtype))

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=-1) if self.scoring == "softmax" else logits.sigmoid()

    def _select(self, scores: Tensor) -> Tensor:
        if isinstance(self.selection_bias, Tensor):
            scores = scores + self.selection_bias
        if self.top_groups < self.groups:
            scores = keep_best_groups(scores, self.groups, self.top_groups)
        return best(scores, self.top_k)


def _check(experts: int, top_k: int, scoring: str, groups: int, top_groups: int | None, capacity: float | None) -> None:
    if scoring not in ("softmax", "sigmoid"):
        raise BuildError(f"router: scoring is {scoring!r}; choose softmax or sigmoid")
    if not 1 <= top_k <= experts:
        raise BuildError(f"router: top_k is {top_k}; with {experts} experts choose 1 to {experts}")
    if groups < 1 or experts % groups:
        raise BuildError(f"router: groups is {groups}, which does not divide the {experts} experts; choose a divisor")
    if groups > 1 and top_groups is None:
        raise BuildError(f"router: there are {groups} groups; set top_groups, the number that a token may use")
    if top_groups is not None and not 1 <= top_groups <= groups:
        raise BuildError(f"router: top_groups is {top_groups}; with {groups} groups choose 1 to {groups}")
    reachable = experts // groups * (top_groups or groups)
    if top_k > reachable:
        raise BuildError(
            f"router: top_k is {top_k}, but {top_groups} of {groups} groups hold {reachable} experts; "
            "raise top_groups or lower top_k"
        )
    if capacity is not None and not 0 < capacity < math.inf:
        raise BuildError(f"router: capacity is {capacity}; choose a number above zero, or None to drop nothing")

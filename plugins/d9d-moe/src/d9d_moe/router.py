"""The router that picks the k experts with the best scores.

Shapes: T tokens, H features, E experts, k experts of a token, G groups of E/G neighbouring experts.
"""

from __future__ import annotations

from typing import Literal

import torch
from d9d_core.errors import BuildError
from torch import Tensor, nn
from torch.nn import functional

from d9d_moe.routing import Routing
from d9d_moe.selection import best, keep_best_groups

#: Keeps a sum of scores that all underflowed from dividing zero by zero; too small to change any other sum.
_TINY = 1e-20


class TopKRouter(nn.Module):
    """Scores ``s = softmax(W h)`` or ``sigmoid(W h)``; the k best experts, each weighted by its score.

    Softmax over all experts, then the k best: Fedus et al. 2021, "Switch Transformers", equations 1 and 2 for k = 1;
    renormalised to a sum of one: Qwen3-MoE, Mixtral. Sigmoid, groups, renormalisation and scale: DeepSeek-AI 2024,
    "DeepSeek-V3", equations 12 to 16; a bias that only the selection sees: Wang et al. 2024, "Auxiliary-Loss-Free
    Load Balancing", equation 3.

    Logits and scores are computed in float32 or wider, under autocast too: experts that differ by less than a
    bfloat16 can tell would be picked by chance. Of equal scores, the lower expert wins, on every device.

    Args:
        hidden_size: H.
        experts: E.
        top_k: k.
        std: initial standard deviation of W.
        scoring: how logits become scores.
        renormalise: divide a token's weights by their sum.
        scale: of the weights, at the end.
        groups: G; experts are picked from the best groups only, which bounds the nodes that a token travels to.
        top_groups: how many groups a token may use; needed if there is more than one.
        selection_bias: keep a buffer float32 [E] of this name, at first zeros, that is added to the scores for the
            selection and not for the weights.

    Raises:
        BuildError: the numbers do not fit each other.
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
    ) -> None:
        super().__init__()
        _check(experts, top_k, scoring, groups, top_groups)
        self.experts = experts
        self.top_k = top_k
        self.std = std
        self.scoring = scoring
        self.renormalise = renormalise
        self.scale = scale
        self.groups = groups
        self.top_groups = top_groups or groups
        self.weight = nn.Parameter(torch.empty(experts, hidden_size))
        bias = torch.empty(experts, dtype=torch.float32) if selection_bias else None
        self.register_buffer("selection_bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw W from N(0, std); zero the bias."""
        nn.init.normal_(self.weight, std=self.std)
        if isinstance(self.selection_bias, Tensor):
            nn.init.zeros_(self.selection_bias)

    def forward(self, tokens: Tensor) -> Routing:
        """Tokens [T, H] -> indices and weights [T, k], best first, and scores [T, E]."""
        logits = self._logits(tokens)
        scores = logits.softmax(dim=-1) if self.scoring == "softmax" else logits.sigmoid()
        indices = self._select(scores.detach())
        weights = scores.gather(1, indices)
        if self.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return Routing(indices, weights * self.scale, scores)

    def _logits(self, tokens: Tensor) -> Tensor:
        dtype = torch.promote_types(tokens.dtype, torch.float32)
        if tokens.is_meta:  # has no autocast to switch off
            return functional.linear(tokens.to(dtype), self.weight.to(dtype))
        with torch.autocast(tokens.device.type, enabled=False):
            return functional.linear(tokens.to(dtype), self.weight.to(dtype))

    def _select(self, scores: Tensor) -> Tensor:
        if isinstance(self.selection_bias, Tensor):
            scores = scores + self.selection_bias
        if self.top_groups < self.groups:
            scores = keep_best_groups(scores, self.groups, self.top_groups)
        return best(scores, self.top_k)


def _check(experts: int, top_k: int, scoring: str, groups: int, top_groups: int | None) -> None:
    if scoring not in ("softmax", "sigmoid"):
        raise BuildError(f"router: scoring is {scoring!r}; choose softmax or sigmoid")
    if not 1 <= top_k <= experts:
        raise BuildError(f"router: top_k is {top_k}; with {experts} experts choose 1 to {experts}")
    if groups < 1 or experts % groups:
        raise BuildError(f"router: {experts} experts do not form {groups} groups of equal size; choose a divisor")
    if groups > 1 and top_groups is None:
        raise BuildError(f"router: there are {groups} groups, but top_groups does not say how many a token may use")
    if top_groups is not None and not 1 <= top_groups <= groups:
        raise BuildError(f"router: top_groups is {top_groups}; with {groups} groups choose 1 to {groups}")
    reachable = experts // groups * (top_groups or groups)
    if top_k > reachable:
        raise BuildError(
            f"router: top_k is {top_k}, but {top_groups} of {groups} groups hold {reachable} experts; "
            "raise top_groups or lower top_k"
        )

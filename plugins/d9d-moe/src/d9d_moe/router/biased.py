"""Top-k router with a bias of its logits. Shapes: T tokens, H features, E experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from d9d_moe.router.top_k import TopKRouter


class BiasedTopKRouter(TopKRouter):
    """Top-k router with logits ``W h + b``; b is trained and also changes the weights, unlike a selection bias.

    With renormalised softmax scores, the weights are the softmax of the chosen logits, as in gpt-oss.

    Args:
        hidden_size, experts, top_k, options: see :class:`TopKRouter`. The bias [E] starts at zero.
    """

    def __init__(self, hidden_size: int, experts: int, top_k: int, **options: Any) -> None:
        super().__init__(hidden_size, experts, top_k, **options)
        self.bias = nn.Parameter(torch.zeros(experts))

    def reset_parameters(self) -> None:
        """Draw W from N(0, std ** 2); set the bias and the buffers to zero."""
        super().reset_parameters()
        if "bias" in self._parameters:  # false in the base's constructor, which calls this before there is a bias
            nn.init.zeros_(self.bias)

    def _logits(self, tokens: Tensor) -> Tensor:
        logits = super()._logits(tokens)
        return logits + self.bias.to(logits.dtype)

"""Lion (Chen et al. 2023, Symbolic Discovery of Optimization Algorithms, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from d9d_optim.optimizer.base import Batch, NamedOptimizer, keep_if, zeros
from d9d_optim.optimizer.config import LionConfig


class Lion(NamedOptimizer):
    """Lion: each weight moves by the learning rate against the sign of an average of gradients, plus weight decay.

    State per parameter: ``exp_avg`` in the parameter's shape.
    """

    def __init__(self, config: LionConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._betas = config.betas

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slot of the state: the average of gradients."""
        return {"exp_avg": zeros}

    def update(self, batch: Batch) -> None:
        """Update each tensor of the batch with a few tensor operations."""
        now, later = self._betas
        for weight, gradient, average in zip(batch.params, batch.grads, batch.slots["exp_avg"], strict=True):
            moved = weight.mul(1 - batch.lr * batch.weight_decay)
            moved.add_(average.lerp(gradient, 1 - now).sign_(), alpha=-batch.lr)
            keep_if(batch.gate, weight, moved)
            keep_if(batch.gate, average, average.lerp(gradient, 1 - later))

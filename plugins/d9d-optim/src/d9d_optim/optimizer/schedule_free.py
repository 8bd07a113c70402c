"""Schedule-free AdamW (Defazio et al. 2024, The Road Less Scheduled, algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import torch
from d9d_core.tensors import local
from torch import Tensor, nn

from d9d_optim.optimizer.base import Batch, NamedOptimizer, counter, keep_if, replaced, zeros
from d9d_optim.optimizer.config import ScheduleFreeConfig


class ScheduleFree(NamedOptimizer):
    """Schedule-free AdamW: weights for evaluation are an average of its iterates, so the learning rate needs no decay.

    With iterates z, their average x and ``y = (1 - beta1) z + beta1 x``, the parameters hold y, where gradients are
    computed. :meth:`evaluation_weights` makes them hold x, which is computed from y and z.

    State per parameter: ``z`` and ``exp_avg_sq`` in the parameter's shape; 0-d float32 ``step`` (number of steps
    taken), ``weight_sum`` (sum of the weights that iterates have in the average) and ``largest_lr``.
    """

    def __init__(self, config: ScheduleFreeConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._config = config

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slots of a parameter's state: the iterate, the second moment and three numbers."""
        return {"z": _copy, "exp_avg_sq": zeros, "step": counter, "weight_sum": counter, "largest_lr": counter}

    def update(self, batch: Batch) -> None:
        """Update each tensor of the batch with a few tensor operations."""
        config = self._config
        beta1, beta2 = config.betas
        for index, (y, gradient) in enumerate(zip(batch.params, batch.grads, strict=True)):
            z, square, step, weight_sum, largest = (batch.slots[slot][index] for slot in self.slots)
            taken, rate = step + 1, largest.clamp(min=batch.lr)
            new_square = square.mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = (new_square / (1 - beta2**taken)).sqrt_().add_(config.eps)
            direction = (gradient / root).add_(y, alpha=batch.weight_decay)
            weight = rate**config.weight_power
            total = weight_sum + weight
            share = torch.where(total > 0, weight / total, 0.0)  # weight of the new iterate in the average
            # ``new_y`` is (1 - beta1) z' + beta1 x', with z' = z - lr d and x' = x + share (z' - x).
            new_y = torch.lerp(y, z, share.to(y.dtype)) + direction * (batch.lr * (beta1 * (1 - share) - 1)).to(y.dtype)
            keep_if(batch.gate, y, new_y)
            keep_if(batch.gate, z, z.add(direction, alpha=-batch.lr))
            for kept, new in ((square, new_square), (step, taken), (weight_sum, total), (largest, rate)):
                keep_if(batch.gate, kept, new)

    @property
    def average(self) -> tuple[str, float]:
        """Name ``z`` of the iterate's state tensor, and the weight ``1 - 1 / beta1``: ``x = lerp(y, z, weight)``."""
        return "z", 1 - 1 / self._config.betas[0]

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the parameters hold the averages inside the ``with`` block; afterwards their bits are restored.

        The block takes memory for a copy of this rank's parameters.
        """
        state, (slot, weight) = self._materialised(), self.average

        def averaged(name: str, y: Tensor) -> Tensor:
            z = local(state[name][slot])
            return torch.lerp(y.to(z.dtype), z, weight)

        return replaced(self._parameters, averaged)


def _copy(parameter: Tensor, dtype: torch.dtype) -> Tensor:
    return parameter.detach().to(dtype, copy=True)

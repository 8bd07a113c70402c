"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from d9d_optim.optimizer.base import Batch, NamedOptimizer, counter, zeros
from d9d_optim.optimizer.config import AdamWConfig


class AdamW(NamedOptimizer):
    """AdamW with the same bits as ``torch.optim.AdamW(fused=True)``, gated steps and state by name.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` of its shape, ``step`` (0-d float32, taken steps).
    """

    def __init__(self, config: AdamWConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._betas = config.betas
        self._eps = config.eps

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """The two moments and the count of taken steps."""
        return {"exp_avg": zeros, "exp_avg_sq": zeros, "step": counter}

    def update(self, batch: Batch) -> None:
        """One fused call for the whole batch."""
        adamw(
            batch.params,
            batch.grads,
            batch.slots["exp_avg"],
            batch.slots["exp_avg_sq"],
            [],
            batch.slots["step"],
            fused=True,
            found_inf=batch.found_inf,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=batch.lr,
            weight_decay=batch.weight_decay,
            eps=self._eps,
            maximize=False,
        )

"""AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from d9d_optim.optimizer.base import Batch, NamedOptimizer, counter, zeros
from d9d_optim.optimizer.config import AdamWConfig
from d9d_optim.optimizer.groups import ParameterGroup


class AdamW(NamedOptimizer):
    """AdamW with the same bits as ``torch.optim.AdamW(fused=True)``, gated steps and state by name.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` of its shape, ``step`` (0-d float32, taken steps).
    """

    def __init__(self, config: AdamWConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._betas = config.betas
        self._eps = config.eps

    @property
    def _slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        return {"exp_avg": zeros, "exp_avg_sq": zeros, "step": counter}

    def _update(self, group: ParameterGroup, batch: Batch, lr: float, found_inf: Tensor) -> None:
        adamw(
            batch.params,
            batch.grads,
            batch.slots["exp_avg"],
            batch.slots["exp_avg_sq"],
            [],
            batch.slots["step"],
            fused=True,
            found_inf=found_inf,
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=lr,
            weight_decay=group.weight_decay,
            eps=self._eps,
            maximize=False,
        )

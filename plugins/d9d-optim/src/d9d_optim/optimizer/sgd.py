"""Stochastic gradient descent with momentum, as torch defines it (the learning rate multiplies the velocity)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from d9d_optim.optimizer.base import Batch, NamedOptimizer, zeros
from d9d_optim.optimizer.config import SGDConfig


class SGD(NamedOptimizer):
    """SGD with the same bits as ``torch.optim.SGD(fused=True)``, gated steps and state by name.

    State per parameter: ``momentum_buffer`` of its shape, or none at all without momentum. It starts as zeros
    instead of as a copy of the first gradient: the first update is the same (0 * momentum + gradient), the state can be
    loaded into before any step, and a first step that the gate refuses needs no special case.
    """

    def __init__(self, config: SGDConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._momentum = config.momentum
        self._nesterov = config.nesterov

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """The velocity, if there is momentum."""
        return {"momentum_buffer": zeros} if self._momentum else {}

    def update(self, batch: Batch) -> None:
        """One fused call for the whole batch."""
        buffers: list[Tensor | None] = (
            [*batch.slots["momentum_buffer"]] if self._momentum else [None] * len(batch.params)
        )
        sgd(
            batch.params,
            batch.grads,
            buffers,
            fused=True,
            found_inf=batch.found_inf,
            weight_decay=batch.weight_decay,
            momentum=self._momentum,
            lr=batch.lr,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
        )

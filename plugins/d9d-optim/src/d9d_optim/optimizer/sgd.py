"""Stochastic gradient descent with momentum, as torch defines it (the learning rate multiplies the velocity)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from d9d_optim.optimizer.base import Batch, NamedOptimizer, zeros
from d9d_optim.optimizer.config import SGDConfig


class SGD(NamedOptimizer):
    """SGD with the same bits as ``torch.optim.SGD(fused=True)`` of the newest torch, gated steps and state by name.

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
        params, grads = [_exact(p) for p in batch.params], [_exact(g) for g in batch.grads]
        kept = batch.slots["momentum_buffer"] if self._momentum else []
        velocities = [_exact(velocity) for velocity in kept]
        buffers: list[Tensor | None] = [*velocities] if self._momentum else [None] * len(params)
        sgd(
            params,
            grads,
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
        for own, computed in zip([*batch.params, *kept], [*params, *velocities], strict=True):
            if computed is not own:
                own.copy_(computed)


def _exact(tensor: Tensor) -> Tensor:
    """The tensor, or its copy in float32 if it is narrow and on a CPU.

    The fused kernel of torch 2.11 to 2.13 leaves most elements of narrow tensors on a CPU as they are, without an error
    (https://github.com/pytorch/pytorch/issues/191763).
    """
    return tensor.float() if tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16) else tensor

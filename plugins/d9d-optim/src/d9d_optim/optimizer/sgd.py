"""Stochastic gradient descent with momentum, as in torch (the learning rate multiplies the velocity)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from d9d_optim.optimizer.base import Batch, NamedOptimizer, counter, keep_if, zeros
from d9d_optim.optimizer.config import SGDConfig


class SGD(NamedOptimizer):
    """SGD, bit-identical to ``torch.optim.SGD(fused=True)`` of the newest torch, with gated steps and state by name.

    State per parameter: ``momentum_buffer`` in the parameter's shape, or none without momentum. The buffer starts with
    zeros instead of a copy of the first gradient: the first update is the same (0 * momentum + gradient), a checkpoint
    can be loaded before any step, and a first step with a false gate needs no special case. With ``dampening`` the
    first gradient counts in full, so the number of steps taken is kept too (``step``), and results are bit-identical to
    ``torch.optim.SGD(foreach=True)``.
    """

    takes_divisor = True

    def __init__(self, config: SGDConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._config = config

    @property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Slots of a parameter's state: the velocity with momentum, and the number of steps taken with dampening."""
        if not self._config.momentum:
            return {}
        return {"momentum_buffer": zeros, **({"step": counter} if self._config.dampening else {})}

    def update(self, batch: Batch) -> None:
        """Update the batch with one fused call; with dampening, each tensor with a few operations."""
        if self._config.dampening:
            self._update_dampened(batch)
            return
        momentum = self._config.momentum
        params, grads = [_exact(p) for p in batch.params], [_exact(g) for g in batch.grads]
        kept = batch.slots["momentum_buffer"] if momentum else []
        velocities = [_exact(velocity) for velocity in kept]
        buffers: list[Tensor | None] = [*velocities] if momentum else [None] * len(params)
        sgd(
            params,
            grads,
            buffers,
            fused=True,
            grad_scale=batch.divisor,
            found_inf=batch.found_inf,
            weight_decay=batch.weight_decay,
            momentum=momentum,
            lr=batch.lr,
            dampening=0.0,
            nesterov=self._config.nesterov,
            maximize=self._config.maximize,
        )
        for own, computed in zip([*batch.params, *kept], [*params, *velocities], strict=True):
            if computed is not own:
                own.copy_(computed)

    def _update_dampened(self, batch: Batch) -> None:
        config = self._config
        slots = zip(batch.slots["momentum_buffer"], batch.slots["step"], strict=True)
        for weight, gradient, (velocity, step) in zip(batch.params, batch.grads, slots, strict=True):
            final = gradient if batch.divisor is None else gradient / batch.divisor
            final = -final if config.maximize else final
            if batch.weight_decay:
                final = final.add(weight, alpha=batch.weight_decay)
            later = velocity.mul(config.momentum).add(final, alpha=1 - config.dampening)
            moved = torch.where(step > 0, later, final)
            keep_if(batch.gate, velocity, moved)
            keep_if(batch.gate, weight, weight.add(moved, alpha=-batch.lr))
            keep_if(batch.gate, step, step + 1)


def _exact(tensor: Tensor) -> Tensor:
    """Return the tensor, or a float32 copy if the tensor is narrower than float32 and on a CPU.

    On a CPU, the fused kernel of torch 2.11 to 2.13 leaves most elements of narrow tensors unchanged, without an error
    (https://github.com/pytorch/pytorch/issues/191763).
    """
    return tensor.float() if tensor.device.type == "cpu" and tensor.dtype in (torch.bfloat16, torch.float16) else tensor

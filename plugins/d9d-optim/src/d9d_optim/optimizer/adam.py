"""Adam (Kingma and Ba), with decoupled weight decay (Loshchilov and Hutter) or decay in the gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.optim.adam import adam

from d9d_optim.optimizer.base import Batch, NamedOptimizer, counter, zeros
from d9d_optim.optimizer.config import AdamConfig, AdamFields


class FusedAdam(NamedOptimizer):
    """Base of Adam and AdamW with torch's fused kernels.

    State per parameter: ``exp_avg`` and ``exp_avg_sq`` in the parameter's shape, with ``amsgrad`` also
    ``max_exp_avg_sq``, and ``step`` (0-d float32, number of steps taken).

    Args:
        config: learning rate, betas, decay and groups.
        parameters: all parameters of the model by name.
        decoupled: whether weight decay is applied to the weights instead of the gradient.
    """

    takes_divisor = True

    def __init__(self, config: AdamFields, parameters: Mapping[str, nn.Parameter], decoupled: bool) -> None:
        super().__init__(config, parameters)
        self._config = config
        self._decoupled = decoupled

    @cached_property
    def slots(self) -> Mapping[str, Callable[[Tensor, torch.dtype], Tensor]]:
        """Tensors (slots) of a parameter's state: the moments and the number of steps taken."""
        largest: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = (
            {"max_exp_avg_sq": zeros} if self._config.amsgrad else {}
        )
        return {"exp_avg": zeros, "exp_avg_sq": zeros, **largest, "step": counter}

    def update(self, batch: Batch) -> None:
        """Update the batch with one call of torch's fused kernel."""
        config = self._config
        update_adam(
            batch,
            config.betas,
            config.eps,
            decoupled=self._decoupled,
            amsgrad=config.amsgrad,
            maximize=config.maximize,
        )


class Adam(FusedAdam):
    """Adam, bit-identical to ``torch.optim.Adam(fused=True)``, with gated steps and state by name."""

    def __init__(self, config: AdamConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters, config.decoupled_weight_decay)


def update_adam(
    batch: Batch,
    betas: tuple[float, float],
    eps: float,
    *,
    decoupled: bool,
    amsgrad: bool = False,
    maximize: bool = False,
) -> None:
    """Make one fused step of Adam with the tensors of a batch."""
    adam(
        batch.params,
        batch.grads,
        batch.slots["exp_avg"],
        batch.slots["exp_avg_sq"],
        batch.slots["max_exp_avg_sq"] if amsgrad else [],
        batch.slots["step"],
        fused=True,
        grad_scale=batch.divisor,
        found_inf=batch.found_inf,
        decoupled_weight_decay=decoupled,
        amsgrad=amsgrad,
        beta1=betas[0],
        beta2=betas[1],
        lr=batch.lr,
        weight_decay=batch.weight_decay,
        eps=eps,
        maximize=maximize,
    )

"""Averages of the weights over steps, on top of any optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from d9d_core.config import PluginConfig
from d9d_core.errors import BuildError
from d9d_core.optimizer import AveragesWeights, DeclaresCollectives, DividesGradients, Optimizer
from d9d_core.tensors import local
from d9d_core.traits import HasOps
from torch import Tensor, nn

from d9d_optim.optimizer.base import counter, replaced
from d9d_optim.optimizer.config import EmaConfig

#: Names (slots) of a parameter's state tensors: the average, and the number of steps taken.
AVERAGE, STEPS = "average", "average_steps"


class StoredAverages:
    """Optimizer that also averages its parameters, and keeps the averages in its state only.

    State per parameter, in addition to the state of the averaged optimizer: ``average``, float32 or wider, in the
    parameter's shape and layout; and ``average_steps``, 0-d float32. Averages are elementwise: each rank averages its
    own shards, without communication.

    Args:
        config: decay, and config of the averaged optimizer.
        parameters: trained parameters by name.
        build: function that builds the averaged optimizer.

    Raises:
        BuildError: the averaged optimizer has weights of its own for evaluation.
    """

    def __init__(
        self,
        config: EmaConfig,
        parameters: Mapping[str, nn.Parameter],
        build: Callable[[PluginConfig, Mapping[str, nn.Parameter]], Optimizer],
    ) -> None:
        self._config = config
        self._inner = inner = build(config.of, parameters)
        if isinstance(inner, AveragesWeights):
            raise BuildError(
                f"optimizer.of: '{config.of.selector}' averages its weights itself; write it under optimizer"
            )
        self._parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self._state: dict[str, dict[str, Tensor]] = {}
        if isinstance(inner, DividesGradients):
            self.divide_gradients = inner.divide_gradients
        if isinstance(inner, DeclaresCollectives):
            self.collectives = inner.collectives
        if isinstance(inner, HasOps):
            self.op_slots = inner.op_slots

    def init_state(self) -> None:
        """Initialise the state of the averaged optimizer, and the averages with the current weights.

        Raises:
            BuildError: the averaged optimizer has state with the name of an average.
        """
        self._inner.init_state()
        self._state = {
            name: {AVERAGE: _copy(parameter), STEPS: counter(parameter, torch.float32)}
            for name, parameter in self._parameters.items()
        }
        if both := sorted(self._inner.state().keys() & self._own_state().keys()):
            raise BuildError(f"optimizer.of: the optimizer '{self._config.of.selector}' has a state called '{both[0]}'")

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        """Update the parameters, then move the averages of all parameters with a gradient towards them.

        Args:
            gate: 0-d bool; if false, averages keep their values too. It is read on the device.
        """
        self._inner.step(gate)
        by_device: dict[torch.device, list[str]] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                by_device.setdefault(parameter.device, []).append(name)
        for device, names in by_device.items():
            here = gate.to(device)
            counters = [self._state[name][STEPS] for name in names]
            steps = torch.stack(counters) + here
            # One operation for all parameters: a kernel per parameter would take longer.
            shares = torch.where(here, self._share(steps), 0.0)
            torch._foreach_copy_(counters, list(steps.unbind()))
            for name, share in zip(names, shares.unbind(), strict=True):
                average = local(self._state[name][AVERAGE])
                average.lerp_(local(self._parameters[name]).to(average.dtype), share.to(average.dtype))

    def set_lr_factor(self, factor: float) -> None:
        """Set the factor on the base learning rates of the averaged optimizer."""
        self._inner.set_lr_factor(factor)

    @property
    def lr(self) -> float:
        """Current learning rate of the averaged optimizer's first group."""
        return self._inner.lr

    def describe(self) -> Mapping[str, Any]:
        """Parameter groups of the averaged optimizer."""
        return self._inner.describe()

    def state(self) -> Mapping[str, Tensor]:
        """State of the averaged optimizer, and the averages."""
        return {**self._inner.state(), **self._own_state()}

    def _own_state(self) -> dict[str, Tensor]:
        return {f"{name}/{slot}": tensor for name, slots in self._state.items() for slot, tensor in slots.items()}

    def _share(self, steps: Tensor) -> Tensor:
        """Fraction of the newest weights in each average, float32 [n], from the number of steps taken, float32 [n]."""
        config, averaged = self._config, steps - self._config.start
        if config.decay is None:
            return averaged.clamp(min=1).reciprocal()
        share = torch.full_like(averaged, 1 - config.decay)
        if config.warmup:
            share = torch.maximum(share, 9 / (averaged.clamp(min=0) + 10))  # 1 - (1 + n) / (10 + n)
        return torch.where(averaged > 0, share, 1.0)


class Ema(StoredAverages):
    """Optimizer that also averages its parameters, and uses the averages for evaluation and export."""

    @property
    def average(self) -> tuple[str, float]:
        """Name of the state tensor with the average, and the weight 1: evaluation uses the average in full."""
        return AVERAGE, 1.0

    def evaluation_weights(self) -> AbstractContextManager[None]:
        """Let the parameters hold the averages inside the ``with`` block; afterwards their bits are restored.

        The block takes memory for a copy of this rank's parameters.
        """
        return replaced(self._parameters, lambda name, _: local(self._state[name][AVERAGE]))


def ema(
    config: EmaConfig,
    parameters: Mapping[str, nn.Parameter],
    build: Callable[[PluginConfig, Mapping[str, nn.Parameter]], Optimizer],
) -> StoredAverages:
    """Build the optimizer ``ema``; for the arguments see :class:`StoredAverages`."""
    return (Ema if config.apply else StoredAverages)(config, parameters, build)


def _copy(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)

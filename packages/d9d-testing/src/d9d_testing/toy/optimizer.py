"""Toy optimizer: gradient descent with momentum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from d9d_core.strategy import Collective
from d9d_core.tensors import local
from torch import Tensor, nn

from d9d_testing.toy.config import ToyOptimizerConfig


class ToyOptimizer:
    """Optimizer ``m = 0.9 m + g; p = p - lr m``."""

    def __init__(self, config: ToyOptimizerConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self._base = config.lr
        self._lr = config.lr
        self._parameters = dict(parameters)
        self._momentum: dict[str, Tensor] = {}

    def init_state(self) -> None:
        """Create the momentum buffers, filled with zeros."""
        self._momentum = {name: torch.zeros_like(p) for name, p in self._parameters.items()}

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        """Update parameters and momentum if the gate is open."""
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            weight, old = local(parameter), local(self._momentum[name])
            new = torch.where(gate, 0.9 * old + local(parameter.grad), old)
            old.copy_(new)
            weight.copy_(torch.where(gate, weight - self._lr * new, weight))

    def set_lr_factor(self, factor: float) -> None:
        """Set the learning-rate factor of the next steps."""
        self._lr = self._base * factor

    @property
    def lr(self) -> float:
        """Current learning rate."""
        return self._lr

    def describe(self) -> Mapping[str, Any]:
        """Description for ``d9d explain``: one group with all parameters."""
        return {"all": {"lr": self._base, "parameters": list(self._parameters)}}

    def collectives(self) -> Sequence[Collective]:
        """No collectives: updates are elementwise."""
        return ()

    def state(self) -> Mapping[str, Tensor]:
        """Momentum by parameter name."""
        return {f"{name}/momentum": tensor for name, tensor in self._momentum.items()}

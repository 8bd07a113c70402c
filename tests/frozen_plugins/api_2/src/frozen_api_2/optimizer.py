"""Optimizer and learning-rate schedule."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from d9d_core.optimizer import LrSchedule
from d9d_core.strategy import Collective
from d9d_core.tensors import local
from torch import Tensor, nn

from frozen_api_2.config import MomentumConfig, RampConfig


class Momentum:
    def __init__(self, config: MomentumConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self.config, self.parameters = config, dict(parameters)
        self._lr = config.lr
        self.momentum: dict[str, Tensor] = {}

    def init_state(self) -> None:
        self.momentum = {name: torch.zeros_like(parameter) for name, parameter in self.parameters.items()}

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                continue
            weight, old = local(parameter), local(self.momentum[name])
            new = torch.where(gate, self.config.momentum * old + local(parameter.grad), old)
            old.copy_(new)
            weight.copy_(torch.where(gate, weight - self._lr * new, weight))

    def set_lr_factor(self, factor: float) -> None:
        self._lr = self.config.lr * factor

    @property
    def lr(self) -> float:
        return self._lr

    def describe(self) -> Mapping[str, Any]:
        return {"all": {"lr": self.config.lr, "parameters": list(self.parameters)}}

    def state(self) -> Mapping[str, Tensor]:
        return {f"{name}/momentum": tensor for name, tensor in self.momentum.items()}

    def collectives(self) -> Sequence[Collective]:
        return ()


def ramp(config: RampConfig, total_steps: int) -> LrSchedule:
    return lambda step: min(1.0, (step + 1) / config.steps)

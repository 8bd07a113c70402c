"""Optimizer ``signum``: Bernstein et al. 2018, "signSGD", algorithm 2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.tensors import local
from torch import Tensor, nn

from acme_tuning.config import SignumConfig


class Signum:
    """Update ``m = b m + (1 - b) g``, then ``p -= lr sign(m)``: each weight moves by the learning rate."""

    def __init__(self, config: SignumConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self._config = config
        self._lr = config.lr
        self._parameters = dict(parameters)
        self._average: dict[str, Tensor] = {}

    def init_state(self) -> None:
        """Create averages of zero, sharded like the parameters, so that any layout can load them."""
        self._average = {name: torch.zeros_like(parameter) for name, parameter in self._parameters.items()}

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        """Update every parameter that has a gradient.

        Args:
            gate: 0-d bool on the parameters' device; if false, nothing changes. Evaluated on the device by
                ``torch.where``, because 0 * NaN is NaN.
        """
        for name, parameter in self._parameters.items():
            if parameter.grad is None:
                continue
            weight, average, gradient = local(parameter), local(self._average[name]), local(parameter.grad)
            next_average = torch.lerp(gradient.to(average.dtype), average, self._config.momentum)
            weight.copy_(torch.where(gate, weight - self._lr * next_average.sign(), weight))
            average.copy_(torch.where(gate, next_average, average))

    def set_lr_factor(self, factor: float) -> None:
        """Set the factor on the learning rate for the next steps."""
        self._lr = self._config.lr * factor

    @property
    def lr(self) -> float:
        """Current learning rate."""
        return self._lr

    def describe(self) -> Mapping[str, Any]:
        """One group with all parameters, for ``d9d explain``."""
        return {"all": {"lr": self._config.lr, "parameters": list(self._parameters)}}

    def state(self) -> Mapping[str, Tensor]:
        """``"<parameter>/average"`` -> average; a checkpoint is loaded into these tensors."""
        return {f"{name}/average": average for name, average in self._average.items()}

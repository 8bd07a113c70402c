"""Toy fine-tuning method: low-rank adapters of linear layers (Hu et al. 2021, "LoRA", section 4.1).

Legend: O features out, I features in, R rank.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch
from d9d_core.errors import BuildError
from torch import Tensor, nn

from d9d_testing.toy.config import ToyAdapterConfig


class LowRank(nn.Module):
    """Low-rank matrix product ``up down x``; initially zero, so that training starts from the original model."""

    def __init__(self, weight_OI: Tensor, rank: int) -> None:
        super().__init__()
        features_out, features_in = weight_OI.shape
        self.down = nn.Parameter(weight_OI.new_empty(rank, features_in))
        self.up = nn.Parameter(weight_OI.new_empty(features_out, rank))

    def reset_parameters(self) -> None:
        """Initialise ``down`` with random values and ``up`` with zeros."""
        nn.init.normal_(self.down, std=self.down.shape[1] ** -0.5)
        nn.init.zeros_(self.up)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return x @ self.down.T @ self.up.T


class AdaptedLinear(nn.Linear):
    """Linear layer with the toy adapter's low-rank update; its own parameters keep their names."""

    adapter: LowRank
    adapter_off: bool

    @classmethod
    def around(cls, linear: nn.Linear, rank: int) -> AdaptedLinear:
        """Adapted copy of a layer, which shares the layer's parameters, with a new adapter on the same device."""
        adapted = cast("AdaptedLinear", _copy(linear, cls))
        adapted.adapter, adapted.adapter_off = LowRank(linear.weight, rank), False
        return adapted

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        own: Tensor = super().forward(x)
        return own if self.adapter_off else own + self.adapter(x)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Plain layer with the adapter merged into its weight."""
        self.weight.add_(self.adapter.up @ self.adapter.down)
        return _copy(self, nn.Linear)


class ToyAdapter:
    """Toy fine-tuning method that replaces each matching ``torch.nn.Linear``."""

    def __init__(self, config: ToyAdapterConfig) -> None:
        self._config = config

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Add adapters and return their parameters.

        Raises:
            BuildError: no linear layer matches.
        """
        found = [(name, m) for name, m in _linears(stage) if fnmatch.fnmatchcase(name, self._config.match)]
        if not found:
            names = ", ".join(name for name, _ in _linears(stage)) or "none"
            raise BuildError(f"peft.match: no linear layer matches '{self._config.match}'; the model has: {names}")
        for name, linear in found:
            stage.set_submodule(name, AdaptedLinear.around(linear, self._config.rank))
        return frozenset(f"{name}.adapter.{leaf}" for name, _ in found for leaf in ("down", "up"))

    def merge(self, stage: nn.Module) -> None:
        """Replace adapted layers by merged plain layers."""
        for name, linear in list(_linears(stage)):
            if isinstance(linear, AdaptedLinear):
                stage.set_submodule(name, linear.merged())

    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        """Disable the adapters inside the block."""
        before = {m: m.adapter_off for m in stage.modules() if isinstance(m, AdaptedLinear)}
        for linear in before:
            linear.adapter_off = True
        try:
            yield
        finally:
            for linear, value in before.items():
                linear.adapter_off = value


def _linears(stage: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    return ((name, module) for name, module in stage.named_modules() if isinstance(module, nn.Linear))


def _copy(linear: nn.Linear, kind: type[nn.Linear]) -> nn.Linear:
    """Copy of a linear layer as another class, which shares the layer's parameters."""
    made = kind(linear.in_features, linear.out_features, bias=False, device="meta", dtype=linear.weight.dtype)
    made.weight = linear.weight
    made.bias = linear.bias
    made.training = linear.training
    return made

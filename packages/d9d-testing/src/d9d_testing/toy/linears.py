"""Toy model of ``torch.nn.Linear``, for methods that change such layers. Legend: B samples, F features."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from torch import Tensor, nn

from d9d_testing.toy.config import ToyLinearsConfig


class ToyLinearBlock(nn.Module):
    """Residual block ``x + tanh(W x + b)``."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, features)

    def forward(self, x_BF: Tensor) -> Tensor:
        """[B, F] -> [B, F]."""
        return x_BF + torch.tanh(self.linear(x_BF))


class ToyLinears(nn.Module):
    """Chain of toy blocks."""

    def __init__(self, config: ToyLinearsConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(index): ToyLinearBlock(config.features) for index in range(config.blocks)})

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{index}": block for index, block in self.layers.items()}

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        """X [B, F] -> {"y": [B, F]}."""
        for block in self.layers.values():
            x = block(x)
        return {"y": x}


def build(config: ToyLinearsConfig, stage: Stage) -> nn.Module:
    """Build the model, which supports only one stage."""
    if stage.count > 1:
        raise BuildError("toy_linears: this model has one stage; use toy_model for a pipeline")
    return ToyLinears(config)

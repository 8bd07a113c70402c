"""The toy model. Legend: B samples, F features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.protocols import Stage
from d9d_core.state.mapper import Mapper, Select
from torch import Tensor, nn

from d9d_testing.toy.config import ToyModelConfig


class ToyBlock(nn.Module):
    """``x + dropout(tanh(x W))``."""

    def __init__(self, features: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.weight = nn.Parameter(torch.empty(features, features))

    def reset_parameters(self) -> None:
        """Small random values."""
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, x_BF: Tensor) -> Tensor:
        """[B, F] -> [B, F]."""
        dropped: Tensor = self.dropout(torch.tanh(x_BF @ self.weight))
        return x_BF + dropped


class ToyModel(nn.Module):
    """A chain of blocks and an unused parameter, which must not disturb anything."""

    def __init__(self, config: ToyModelConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ToyBlock(config.features, config.dropout) for _ in range(config.blocks))
        self.unused = nn.Parameter(torch.empty(1))
        self.register_buffer("scale", torch.empty(1))

    def reset_parameters(self) -> None:
        """Own tensors only."""
        nn.init.ones_(self.unused)
        nn.init.ones_(self.get_buffer("scale"))

    def blocks(self) -> Mapping[str, nn.Module]:
        """The chain."""
        return {f"layers.{index}": block for index, block in enumerate(self.layers)}

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        """X [B, F] -> {"y": [B, F]}."""
        for block in self.layers:
            x = block(x)
        return {"y": x * self.get_buffer("scale")}


class ToyFormat:
    """Export under other names."""

    def config_json(self, config: Any, dtype: str) -> dict[str, Any]:
        """Just the sizes."""
        return {"model_type": "toy", "features": config.features, "dtype": dtype}

    def config_from_json(self, data: Mapping[str, Any]) -> ToyModelConfig:
        """The width; whoever loads knows the rest."""
        return ToyModelConfig(features=data["features"])

    def importer(self, _config: Any, _stored: Any) -> Mapper:
        """Remove the prefix."""
        return Select("toy")

    def exporter(self, config: Any) -> Mapper:
        """Prefix every name."""
        return self.importer(config, config).inverse()


def build(config: ToyModelConfig, _stage: Stage) -> nn.Module:
    """The whole model."""
    return ToyModel(config)

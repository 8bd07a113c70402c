"""The toy model. Legend: B samples, F features."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_core.types import TensorSpec
from torch import Tensor, nn

from d9d_testing.toy.config import ToyModelConfig


class ToyBlock(nn.Module):
    """Residual block ``x + dropout(tanh(x W))``."""

    def __init__(self, features: int, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.weight = nn.Parameter(torch.empty(features, features))

    def reset_parameters(self) -> None:
        """Fill the weight with small random values."""
        nn.init.normal_(self.weight, std=0.3)

    def forward(self, x_BF: Tensor) -> Tensor:
        """[B, F] -> [B, F]."""
        dropped: Tensor = self.dropout(torch.tanh(x_BF @ self.weight))
        return x_BF + dropped


class ToyModel(nn.Module):
    """Toy model, or one stage of it: a chain of blocks, and a parameter that never gets a gradient.

    The unused parameter is on the first stage, the buffer ``scale`` on the last.
    """

    def __init__(self, config: ToyModelConfig, stage: Stage = Stage()) -> None:  # noqa: B008 - Stage is frozen
        super().__init__()
        self.stage = stage
        self.layers = nn.ModuleDict(
            {str(index): ToyBlock(config.features, config.dropout) for index in _blocks_of(config.blocks, stage)}
        )
        if stage.is_first:
            self.unused = nn.Parameter(torch.empty(1))
        if stage.is_last:
            self.register_buffer("scale", torch.empty(1))

    def reset_parameters(self) -> None:
        """Fill the model's own tensors."""
        if self.stage.is_first:
            nn.init.ones_(self.unused)
        if self.stage.is_last:
            nn.init.ones_(self.get_buffer("scale"))

    def blocks(self) -> Mapping[str, nn.Module]:
        """Blocks of the chain, or of this stage."""
        return {f"layers.{index}": block for index, block in self.layers.items()}

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        """``x`` [B, F] in the dtype of the weights; empty for the last stage."""
        if self.stage.is_last:
            return {}
        return {"x": TensorSpec(microbatch["x"].shape, next(self.layers.parameters()).dtype)}

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        """X [B, F] -> {"y": [B, F]}; before the last stage -> {"x": [B, F]}."""
        for block in self.layers.values():
            x = block(x)
        return {"y": x * self.get_buffer("scale")} if self.stage.is_last else {"x": x}


def _blocks_of(blocks: int, stage: Stage) -> range:
    """Indices of a stage's blocks; without ``pipeline.layers``, first stages get the remainder of an even split."""
    counts = stage.layers
    if counts is None:
        size, rest = divmod(blocks, stage.count)
        counts = tuple(size + (index < rest) for index in range(stage.count))
    if len(counts) != stage.count or sum(counts) != blocks or min(counts) < 1:
        raise BuildError(
            f"toy_model: {blocks} blocks cannot be split over {stage.count} stages as {list(counts)}; give "
            f"pipeline.layers {stage.count} numbers that sum up to {blocks}, or take fewer stages"
        )
    return range(sum(counts[: stage.index]), sum(counts[: stage.index + 1]))


def build(config: ToyModelConfig, stage: Stage) -> nn.Module:
    """Build the full model, or one stage of it."""
    return ToyModel(config, stage)

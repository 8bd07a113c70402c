"""Model in pipeline stages, with op slots."""

from collections.abc import Mapping

import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.model import Stage
from d9d_core.types import TensorSpec
from torch import Tensor, nn

from frozen_api_2.config import ChainConfig


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))
        self.act = OpSlot("frozen_act", torch.tanh, width=width)

    def op_slots(self) -> Mapping[str, OpSlot]:
        return {"act": self.act}

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.act(x @ self.weight)
        return y


class Chain(nn.Module):
    def __init__(self, config: ChainConfig, stage: Stage) -> None:
        super().__init__()
        counts = stage.layers or [config.depth // stage.count] * stage.count
        if sum(counts) != config.depth:
            raise BuildError(f"frozen_chain: {config.depth} layers cannot be split as {list(counts)}")
        first = sum(counts[: stage.index])
        self.is_last = stage.is_last
        numbers = range(first, first + counts[stage.index])
        self.layers = nn.ModuleDict({str(number): Layer(config.width) for number in numbers})

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{name}": layer for name, layer in self.layers.items()}

    def boundary(self, microbatch: Mapping[str, TensorSpec]) -> Mapping[str, TensorSpec]:
        if self.is_last:
            return {}
        return {"x": TensorSpec(microbatch["x"].shape, next(self.parameters()).dtype)}

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers.values():
            x = x + layer(x)
        return {"y": x} if self.is_last else {"x": x}

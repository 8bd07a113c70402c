from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Residual block on [B, F] with dropout; counts its forwards."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.up = nn.Linear(features, 4 * features)
        self.down = nn.Linear(4 * features, features)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float) -> Tensor:
        return x + self.dropout(self.down(torch.tanh(self.up(x)))) * scale


class Chain(nn.Module):
    """A few blocks with the trait ``HasBlocks``."""

    def __init__(self, depth: int, features: int) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block(features) for i in range(depth)})

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"layers.{name}": block for name, block in self.layers.items()}

    def forward(self, x: Tensor) -> Tensor:
        for block in self.layers.values():
            x = block(x, scale=0.5)
        return x


class Model(nn.Module):
    """Passes on the blocks of its backbone, as causal language models do."""

    def __init__(self, depth: int, features: int = 4) -> None:
        super().__init__()
        self.backbone = Chain(depth, features)
        self.head = nn.Linear(features, 1)

    def blocks(self) -> Mapping[str, nn.Module]:
        return {f"backbone.{name}": block for name, block in self.backbone.blocks().items()}

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x)).square().mean()


@pytest.fixture
def make_model() -> Callable[..., Model]:
    def make(depth: int = 3) -> Model:
        torch.manual_seed(0)
        return Model(depth)

    return make


@pytest.fixture
def loss_and_gradients() -> Callable[[nn.Module], tuple[Tensor, dict[str, Tensor]]]:
    """Runs forward and backward with fixed inputs and dropout."""

    def run(model: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(2)
        torch.manual_seed(3)
        loss = model(torch.randn(16, 4, generator=generator))
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}

    return run

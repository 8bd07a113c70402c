"""A plugin with a model of mixtures of experts that trains on the toy data of d9d-testing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from d9d_core.config import ModelConfig
from d9d_core.model import Stage
from d9d_core.plugin import ModelSpec, Ref, hookimpl
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from d9d_nn.swiglu import SwiGLU
from torch import Tensor, nn

D9D_API = 2


class MoEToyConfig(ModelConfig):
    """Residual mixtures of experts."""

    name: Literal["moe_toy"] = "moe_toy"
    """Selects this model."""
    features: int = 6
    """Width."""
    experts: int = 8
    """Experts of each layer."""
    layers: int = 2
    """Depth."""


class MoEToy(nn.Module):
    """``x + moe(x)`` several times, with a shared expert in the first layer."""

    def __init__(self, config: MoEToyConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_layer(config, shared=index == 0) for index in range(config.layers))

    def blocks(self) -> Mapping[str, nn.Module]:
        """The layers."""
        return {f"layers.{index}": layer for index, layer in enumerate(self.layers)}

    def forward(self, *, x: Tensor) -> dict[str, Tensor]:
        """X [B, features] -> {"y": [B, features]}."""
        for layer in self.layers:
            x = x + layer(x.unsqueeze(1)).squeeze(1)
        return {"y": x}


def _layer(config: MoEToyConfig, *, shared: bool) -> MoELayer:
    width, inside = config.features, 2 * config.features
    return MoELayer(
        TopKRouter(width, config.experts, top_k=2, std=0.5),
        GroupedSwiGLU(width, inside, config.experts, std=0.3, output_std=0.3),
        LocalDispatcher(),
        shared_expert=SwiGLU(width, inside, std=0.3, output_std=0.3) if shared else None,
    )


def build(config: MoEToyConfig, _stage: Stage) -> nn.Module:
    """The whole model."""
    return MoEToy(config)


@hookimpl
def d9d_models() -> Iterable[ModelSpec]:
    """The model."""
    yield ModelSpec(
        name="moe_toy",
        summary="Mixtures of experts for tests.",
        config=Ref(f"{__name__}:MoEToyConfig"),
        build=Ref(f"{__name__}:build"),
        tiny=Ref(f"{__name__}:MoEToyConfig"),
        provides=frozenset({"model:blocks", "model:experts", "model:late_init", "model:ops"}),
    )

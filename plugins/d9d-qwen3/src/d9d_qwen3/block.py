"""Layers of Qwen3, dense and with experts."""

from __future__ import annotations

from typing import Any

from d9d_moe.balancing.balancers import build_balancers
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.decoder.block import DecoderBlock, RoutedBlock, grouped_query_attention, swiglu

from d9d_qwen3.moe_config import AnyQwen3Config, Qwen3MoeConfig


class Qwen3Block(DecoderBlock):
    """Transformer block: attention with head norms, then SwiGLU.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
    """

    def __init__(self, config: AnyQwen3Config, layer: int) -> None:
        super().__init__(config, _attention(config, layer), swiglu(config, config.intermediate_size))


class Qwen3MoeBlock(RoutedBlock):
    """Transformer block of Qwen3-MoE: attention with head norms, then experts.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
    """

    def __init__(self, config: Qwen3MoeConfig, layer: int) -> None:
        super().__init__(config, _attention(config, layer), experts(config))


def build_block(config: AnyQwen3Config, layer: int) -> DecoderBlock:
    """Build one layer by its index in the whole model."""
    if isinstance(config, Qwen3MoeConfig) and config.has_experts(layer):
        return Qwen3MoeBlock(config, layer)
    return Qwen3Block(config, layer)


def _attention(config: AnyQwen3Config, layer: int) -> GroupedQueryAttention:
    return grouped_query_attention(config, layer, head_norm_eps=config.rms_norm_eps)


def experts(config: Qwen3MoeConfig, **shared: Any) -> MoELayer:
    """Build the router and experts of a layer.

    Args:
        config: config of the whole model.
        shared: arguments ``shared_expert`` and ``shared_gate`` of :class:`~d9d_moe.experts.layer.MoELayer`.
    """
    std, output_std = config.initialization.std, config.initialization.output_std(config.num_layers)
    hidden, count = config.hidden_size, config.num_experts
    router = TopKRouter(
        hidden,
        count,
        config.experts_per_token,
        std=std,
        renormalise=config.renormalise,
        balancing=build_balancers(config.balancing),
        capacity=config.capacity,
    )
    bank = GroupedSwiGLU(hidden, config.moe_intermediate_size, count, std=std, output_std=output_std)
    return MoELayer(router, bank, LocalDispatcher(), **shared)

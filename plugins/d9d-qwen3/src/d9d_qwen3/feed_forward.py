"""Feed-forward part of a layer: SwiGLU, or a mixture of SwiGLU experts."""

from __future__ import annotations

from d9d_moe.balancing.balancers import build_balancers
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from d9d_nn.swiglu import SwiGLU

from d9d_qwen3.moe_config import AnyQwen3Config, Qwen3MoeConfig


def feed_forward(config: AnyQwen3Config, layer: int) -> SwiGLU | MoELayer:
    """Build the feed-forward part of the layer of this index, which maps [B, S, H] to [B, S, H].

    Args:
        config: config of the whole model.
        layer: index in the whole model.
    """
    if isinstance(config, Qwen3MoeConfig) and layer not in config.dense_layers:
        return _experts(config)
    std, output_std = config.initialization.std, config.initialization.output_std(config.num_layers)
    return SwiGLU(config.hidden_size, config.intermediate_size, std=std, output_std=output_std)


def _experts(config: Qwen3MoeConfig) -> MoELayer:
    std, output_std = config.initialization.std, config.initialization.output_std(config.num_layers)
    hidden, experts = config.hidden_size, config.num_experts
    router = TopKRouter(
        hidden,
        experts,
        config.experts_per_token,
        std=std,
        renormalise=config.renormalise,
        balancing=build_balancers(config.balancing),
        capacity=config.capacity,
    )
    bank = GroupedSwiGLU(hidden, config.moe_intermediate_size, experts, std=std, output_std=output_std)
    return MoELayer(router, bank, LocalDispatcher())

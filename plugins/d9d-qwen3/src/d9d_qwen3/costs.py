"""Costs of Qwen3 models. Imports no torch."""

from __future__ import annotations

from d9d_core.cost import Share, StageCost
from d9d_core.model import Stage
from d9d_moe.costs import mixture
from d9d_nn.decoder.costs import FeedForwardCost, decoder_cost, dense_cost, swiglu_cost

from d9d_qwen3.moe_config import AnyQwen3Config, Qwen3MoeConfig


def stage_cost(config: AnyQwen3Config, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a Qwen3 model.

    Raises:
        BuildError: the ranks cannot shard the stage.
    """
    if not isinstance(config, Qwen3MoeConfig):
        return dense_cost(config, stage, share, head_norms=True)
    return decoder_cost(config, stage, share, feed_forward, head_norms=True)


def feed_forward(config: Qwen3MoeConfig, layer: int, share: Share) -> FeedForwardCost:
    """Cost of the router and the experts of a layer, or of the SwiGLU of a dense layer."""
    if not config.has_experts(layer):
        return swiglu_cost(config, layer, share)
    sizes = config.hidden_size, config.moe_intermediate_size, config.num_experts, config.experts_per_token
    return mixture(share, *sizes)

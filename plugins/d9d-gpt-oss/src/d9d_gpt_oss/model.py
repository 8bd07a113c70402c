"""gpt-oss, whole or as one pipeline stage."""

from __future__ import annotations

from d9d_core.model import Stage
from d9d_moe.balancing.balancers import build_balancers
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.clamped_swiglu import ClampedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.biased import BiasedTopKRouter
from d9d_nn.decoder.block import RoutedBlock, grouped_query_attention
from d9d_nn.decoder.model import DecoderModel

from d9d_gpt_oss.config import GptOssConfig


class GptOssBlock(RoutedBlock):
    """Transformer block: attention with sinks, then experts with biases.

    Args:
        config: config of the whole model.
        layer: index of the layer in the whole model.
    """

    def __init__(self, config: GptOssConfig, layer: int) -> None:
        super().__init__(config, grouped_query_attention(config, layer, sinks=True), _experts(config))


class GptOss(DecoderModel):
    """Model gpt-oss, or one pipeline stage of it; see :class:`~d9d_nn.decoder.model.DecoderModel`."""

    def __init__(self, config: GptOssConfig, stage: Stage = Stage()) -> None:  # noqa: B008 - Stage is frozen
        super().__init__(config, stage, GptOssBlock)


def _experts(config: GptOssConfig) -> MoELayer:
    std, output_std = config.initialization.std, config.initialization.output_std(config.num_layers)
    # gpt-oss takes the softmax of the chosen logits. It equals the softmax over all experts, renormalised over the
    # chosen ones.
    router = BiasedTopKRouter(
        config.hidden_size,
        config.num_experts,
        config.experts_per_token,
        std=std,
        balancing=build_balancers(config.balancing),
        capacity=config.capacity,
    )
    experts = ClampedSwiGLU(
        config.hidden_size,
        config.intermediate_size,
        config.num_experts,
        std=std,
        output_std=output_std,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
    )
    return MoELayer(router, experts, LocalDispatcher())

"""DeepSeek-V3, whole or as one pipeline stage."""

from __future__ import annotations

from d9d_core.model import Stage
from d9d_moe.balancing.balancers import build_balancers
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from d9d_nn.attention.latent import MultiHeadLatentAttention
from d9d_nn.decoder.block import DecoderBlock, RoutedBlock, swiglu
from d9d_nn.decoder.model import DecoderModel
from d9d_nn.rope.scaling import latent_score_factor

from d9d_deepseek.config import DeepSeekConfig

#: Epsilon of the norms of latents, which is not ``rms_norm_eps``.
_LATENT_EPS = 1e-6


class DeepSeek(DecoderModel):
    """DeepSeek-V3, or one pipeline stage of it; see :class:`~d9d_nn.decoder.model.DecoderModel`."""

    def __init__(self, config: DeepSeekConfig, stage: Stage = Stage(), *, heads: bool = True) -> None:  # noqa: B008
        super().__init__(config, stage, build_block, heads=heads)


def build_block(config: DeepSeekConfig, layer: int) -> DecoderBlock:
    """Build one layer by its index in the whole model: latent attention, then experts or SwiGLU."""
    if config.has_experts(layer):
        return RoutedBlock(config, _attention(config), _experts(config))
    return DecoderBlock(config, _attention(config), swiglu(config, config.intermediate_size))


def _attention(config: DeepSeekConfig) -> MultiHeadLatentAttention:
    return MultiHeadLatentAttention(
        config.hidden_size,
        heads=config.num_attention_heads,
        query_rank=config.q_lora_rank,
        latent_dim=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rotary_dim=config.qk_rope_head_dim,
        value_dim=config.v_head_dim,
        std=config.initialization.std,
        output_std=config.initialization.output_std(config.num_layers),
        eps=_LATENT_EPS,
        score_factor=latent_score_factor(config.rope_scaling),
        biases=config.biased_projections(),
        mask=config.mask_kind(),
    )


def _experts(config: DeepSeekConfig) -> MoELayer:
    std, output_std = config.initialization.std, config.initialization.output_std(config.num_layers)
    hidden, inside = config.hidden_size, config.moe_intermediate_size
    router = TopKRouter(
        hidden,
        config.num_experts,
        config.experts_per_token,
        std=std,
        scoring="sigmoid",
        renormalise=config.renormalise,
        scale=config.routed_scale,
        groups=config.num_groups,
        top_groups=config.top_groups,
        selection_bias=True,
        balancing=build_balancers(config.balancing),
        capacity=config.capacity,
    )
    bank = GroupedSwiGLU(hidden, inside, config.num_experts, std=std, output_std=output_std)
    shared = swiglu(config, inside * config.num_shared_experts)
    return MoELayer(router, bank, LocalDispatcher(), shared_expert=shared)

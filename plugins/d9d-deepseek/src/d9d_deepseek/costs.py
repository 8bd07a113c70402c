"""Costs of DeepSeek-V3 models. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from d9d_core.cost import OpCost, Share, StageCost, Weight
from d9d_core.model import Stage
from d9d_moe.costs import mixture
from d9d_nn.costs import attention, linear, rms_norm, rotation
from d9d_nn.decoder.costs import FeedForwardCost, MixerCost, decoder_cost, gated_cost, swiglu_cost

from d9d_deepseek.config import DeepSeekConfig


def stage_cost(config: DeepSeekConfig, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a DeepSeek-V3 model.

    Raises:
        BuildError: the ranks cannot shard the stage.
    """
    return decoder_cost(config, stage, share, _feed_forward, mixer=_attention)


def _attention(config: DeepSeekConfig, layer: int, share: Share) -> MixerCost:
    """Cost of latent attention; values count as padded to the size of keys, because most backends need that."""
    tokens, width, hidden = share.tokens, share.width, config.hidden_size
    heads, key, value = config.num_attention_heads // share.tensor, config.head_dim, config.v_head_dim
    latent, rotary = config.kv_lora_rank, config.qk_rope_head_dim
    expanded = heads * (config.qk_nope_head_dim + value)
    joined = width * tokens * heads * (3 * key)  # queries, keys and padded values are copied
    attended = attention(tokens, config.attended_keys(layer, share.length), heads, heads, key, width)
    shape = attended.attention
    assert shape is not None  # all ops of attention have it
    ops = (
        *_queries(config, share, heads * key),
        _linear(config, share, "kv_down", hidden, latent + rotary, keeps_input=False),
        rms_norm("latent norm", tokens, latent, width, weights=(Weight("attention.kv_norm.weight", (latent,)),)),
        rotation(tokens, heads + 1, rotary, width),
        _linear(config, share, "kv_up", latent, expanded, cut=0),
        OpCost("joined heads", "memory", traffic=2 * joined, backward_traffic=2 * joined),
        replace(attended, attention=replace(shape, latent=latent + rotary, expanded=expanded)),
        _linear(config, share, "o_proj", heads * value, hidden, cut=1),
    )
    return MixerCost(ops)


def _queries(config: DeepSeekConfig, share: Share, outputs: int) -> list[OpCost]:
    hidden, rank = config.hidden_size, config.q_lora_rank
    if rank is None:
        return [_linear(config, share, "q_proj", hidden, outputs, cut=0)]
    weights = (Weight("attention.q_proj.norm.weight", (rank,)),)
    return [
        _linear(config, share, "q_proj.down", hidden, rank),
        rms_norm("query norm", share.tokens, rank, share.width, weights=weights),
        _linear(config, share, "q_proj.up", rank, outputs, cut=0),
    ]


def _linear(
    config: DeepSeekConfig,
    share: Share,
    name: str,
    features: int,
    outputs: int,
    *,
    cut: int | None = None,
    keeps_input: bool = True,
) -> OpCost:
    """Cost of a projection of attention. ``tp`` splits its weight along dimension ``cut``; not at all if ``None``."""
    weights = [Weight(f"attention.{name}.weight", (outputs, features), "linear", cut)]
    if name.rpartition(".")[2] in config.biased_projections():
        # A bias is never split, because ``tp`` splits no projection with a bias along its outputs.
        weights.append(Weight(f"attention.{name}.bias", (outputs,)))
    keeps = {"keeps_input": keeps_input}
    return linear(name, share.tokens, features, outputs, share.width, weights=tuple(weights), **keeps)


def _feed_forward(config: DeepSeekConfig, layer: int, share: Share) -> FeedForwardCost:
    """Cost of the routed and the shared experts of a layer, or of the SwiGLU of a dense layer."""
    if not config.has_experts(layer):
        return swiglu_cost(config, layer, share)
    inside = config.moe_intermediate_size
    routed = mixture(share, config.hidden_size, inside, config.num_experts, config.experts_per_token)
    # Under tp, the shared expert gathers its input over positions and keeps it; routed experts do not read this tensor.
    shared = gated_cost(
        config, share, inside * config.num_shared_experts, "ffn.shared_expert", keeps_input=share.tensor > 1
    )
    return routed._replace(
        ops=(*routed.ops, *shared.ops),
        parameters=routed.parameters + shared.parameters,
        workspace=routed.workspace + shared.workspace,
        exchanges=(*routed.exchanges, *shared.exchanges),
        backward_exchanges=(*routed.backward_exchanges, *shared.backward_exchanges),
    )

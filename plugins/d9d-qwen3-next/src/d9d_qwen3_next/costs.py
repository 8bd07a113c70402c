"""Costs of Qwen3-Next and Qwen3.5. Imports no torch."""

from __future__ import annotations

from d9d_core.cost import Exchange, OpCost, Share, StageCost, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_nn.costs import linear, silu_mul
from d9d_nn.decoder.costs import (
    FeedForwardCost,
    MixerCost,
    attention_cost,
    decoder_cost,
    dense_cost,
    sequence_exchanges,
    swiglu_cost,
)
from d9d_qwen3.costs import feed_forward

from d9d_qwen3_next.config import AnyConfig, HybridConfig, Qwen3NextConfig

_FLOAT32 = 4
#: Number of positions of a chunk of the gated delta rule, see :data:`d9d_nn.ops.gated_delta_rule.CHUNK`.
_CHUNK = 64
#: Backends of the gated delta rule that are written in PyTorch, with float32 intermediates that autograd keeps.
_IN_PYTORCH = frozenset({"reference", "chunked"})
#: Passes over a key and a value of each position and head that take as long as the forward and the backward of kernels:
#: 1.03 and 3.30 ms for 16,384 positions and 32 heads of 128 features (``triton`` on an H200).
_PASSES_OF_KERNELS = (16, 52)


def stage_cost(config: AnyConfig, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a Qwen3-Next or Qwen3.5 model.

    Raises:
        BuildError: the ranks cannot shard the stage.
    """
    if config.linear_num_key_heads % share.tensor:
        raise BuildError(
            f"mesh.tp is {share.tensor}, which does not divide the {config.linear_num_key_heads} key heads of Gated "
            "DeltaNet; choose a divisor"
        )
    if not isinstance(config, Qwen3NextConfig):
        return dense_cost(config, stage, share, mixer=_mixer)
    if config.num_experts % share.experts:
        raise BuildError(
            f"mesh.ep is {share.experts}, which does not divide {config.num_experts} experts; use a divisor"
        )
    return decoder_cost(config, stage, share, _experts, mixer=_mixer)


def _mixer(config: HybridConfig, layer: int, share: Share) -> MixerCost:
    if not config.is_recurrent(layer):
        return attention_cost(config, layer, share, head_norms=True, output_gate=True)
    return _gated_delta_net(config, share)


def _gated_delta_net(config: HybridConfig, share: Share) -> MixerCost:
    """Cost of Gated DeltaNet on one rank."""
    tokens, width, tp, hidden = share.tokens, share.width, share.tensor, config.hidden_size
    keys, values = config.key_features // tp, config.linear_value_features // tp
    heads, positions = config.linear_num_value_heads // tp, config.linear_conv_kernel_dim
    outputs = {"q_proj": keys, "k_proj": keys, "v_proj": values, "gate_proj": values}
    outputs |= {"decay_proj": heads, "beta_proj": heads}
    into = tuple(Weight(f"attention.{name}.weight", (rows, hidden), "linear", 0) for name, rows in outputs.items())
    convolved = {"q_conv": keys, "k_conv": keys, "v_conv": values}
    filters = tuple(Weight(f"attention.{name}.weight", (rows, positions), cut=0) for name, rows in convolved.items())
    # Without a compiler, a convolution takes a shifted copy, a product and a sum for each position that it reads.
    passes = 2 if share.compiled else 4 * positions
    size = width * tokens * (2 * keys + values)
    norm, of_values = Weight("attention.norm.weight", (config.linear_value_head_dim,)), width * tokens * values
    ops = (
        linear("query, key, value, gates", tokens, hidden, sum(outputs.values()), width, weights=into),
        OpCost(
            "short convolutions", "memory", traffic=passes * size, backward_traffic=2 * passes * size,
            kept=(2 if share.compiled else positions + 1) * size, rows=tokens, weights=filters,
        ),
        _rule(config, share, heads),
        OpCost(
            "gated norm", "memory", traffic=3 * of_values, backward_traffic=5 * of_values,
            kept=(2 if share.compiled else 2 + 3 * _FLOAT32 / width) * of_values, rows=tokens, weights=(norm,),
        ),
        linear(
            "output", tokens, values, hidden, width,
            weights=(Weight("attention.o_proj.weight", (hidden, values), "linear", 1),),
        ),
    )  # fmt: skip
    if share.context == 1:
        return MixerCost(ops)
    gathered = 2 * share.context * share.samples
    state = config.linear_key_head_dim * (config.linear_key_head_dim + config.linear_value_head_dim)
    sizes = (
        width * gathered * (positions - 1) * (2 * keys + values),
        max(width, _FLOAT32) * gathered * heads * state,
    )
    return MixerCost(
        ops,
        tuple(Exchange("all_gather", "cp", size) for size in sizes),
        tuple(Exchange("reduce_scatter", "cp", size) for size in sizes),
    )


def _rule(config: HybridConfig, share: Share, heads: int) -> OpCost:
    """Cost of the gated delta rule; with ``cp``, values have a key's features in addition to their own."""
    of_key, keys = config.linear_key_head_dim, config.linear_num_key_heads // share.tensor
    of_value = config.linear_value_head_dim + (of_key if share.context > 1 else 0)
    # For each position: products with the keys of its chunk, products that read or update states, and a triangular
    # system. For each chunk: a product of the last state.
    products = _CHUNK * (2 * of_key + of_value) + of_key * (3 * of_value + of_key) + of_key**2 * of_value / _CHUNK
    flops = 2 * products + _CHUNK * (of_key + of_value)
    rows = share.tokens * heads
    op = "gated_delta_rule" if share.context == 1 else "gated_delta_rule_from"
    facts = {"key_heads": keys, "value_heads": heads, "key_dim": of_key, "value_dim": of_value}
    if share.backend(op, facts) in _IN_PYTORCH:
        # Numbers per position and head that autograd keeps, as counted for heads of 128 features; all are float32.
        numbers = 10 * of_key + 7 * of_value + 7 * _CHUNK + of_key * (of_key + 2 * of_value) / _CHUNK
        kept = _FLOAT32 * rows * numbers
        traffic, backward = 2 * kept, 4 * kept
    else:
        # The inverse of a chunk, decay and strength; with cp also float32 outputs and the extended values.
        kept = rows * (share.width * (_CHUNK + 1) + _FLOAT32)
        if share.context > 1:
            kept += rows * (_FLOAT32 + share.width) * of_value
        traffic, backward = (passes * share.width * rows * (of_key + of_value) for passes in _PASSES_OF_KERNELS)
    weights = tuple(Weight(f"attention.decay.{name}", (heads,), cut=0) for name in ("A_log", "dt_bias"))
    total = rows * flops
    return OpCost("gated delta rule", "product", total, 2 * total, traffic, backward, kept, share.tokens, weights)


def _experts(config: Qwen3NextConfig, layer: int, share: Share) -> FeedForwardCost:
    """Cost of the experts of a layer and of the expert that all tokens share, or of the SwiGLU of a dense layer."""
    if not config.has_experts(layer):
        return swiglu_cost(config, layer, share)
    routed, shared = feed_forward(config, layer, share), _shared_expert(config, share)
    around = sequence_exchanges(config, share)
    return routed._replace(
        ops=(*routed.ops, *shared),
        parameters=routed.parameters + sum(weight.numbers for op in shared for weight in op.weights),
        exchanges=(*routed.exchanges, *around),
        backward_exchanges=(*routed.backward_exchanges, *around),
    )


def _shared_expert(config: Qwen3NextConfig, share: Share) -> tuple[OpCost, ...]:
    """Ops of the shared expert, whose features are split over ``tp``, and of its gate."""
    inside, hidden = config.shared_expert_intermediate_size, config.hidden_size
    width, tokens = share.width, share.tokens
    if inside % share.tensor:
        raise BuildError(
            f"mesh.tp is {share.tensor}, which does not divide shared_expert_intermediate_size {inside}; choose a "
            "divisor"
        )
    features, own = inside // share.tensor, tokens / share.tensor
    names = ("ffn.shared_expert.gate_proj.weight", "ffn.shared_expert.up_proj.weight")
    into = tuple(Weight(name, (features, hidden), "linear", 0) for name in names)
    out_of = Weight("ffn.shared_expert.down_proj.weight", (hidden, features), "linear", 1)
    gate, gated = Weight("ffn.shared_gate.weight", (1, hidden), "linear"), width * own * hidden
    return (
        linear("shared gate, up", tokens, hidden, 2 * features, width, keeps_input=share.tensor > 1, weights=into),
        silu_mul(tokens, features, width, compiled=share.compiled),
        linear("shared down", tokens, features, hidden, width, keeps_input=False, weights=(out_of,)),
        linear("gate of shared", own, hidden, 1, width, keeps_input=False, weights=(gate,)),
        OpCost("gated shared", "memory", traffic=5 * gated, backward_traffic=5 * gated, kept=gated),
    )

"""Costs of gpt-oss models. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from d9d_core.cost import OpCost, Share, StageCost, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_moe.costs import dispatch, grouped_swiglu, permutation, router
from d9d_nn.decoder.costs import FeedForwardCost, attention_cost, decoder_cost

from d9d_gpt_oss.config import GptOssConfig


def stage_cost(config: GptOssConfig, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a gpt-oss model.

    Raises:
        BuildError: the ranks cannot shard the stage.
    """
    if config.num_experts % share.experts:
        raise BuildError(
            f"mesh.ep is {share.experts}, which does not divide {config.num_experts} experts; use a divisor"
        )
    return decoder_cost(
        config, stage, share, _feed_forward, mixer=partial(attention_cost, head_norms=False, sinks=True)
    )


def _feed_forward(config: GptOssConfig, _layer: int, share: Share) -> FeedForwardCost:
    """Cost of the router and the experts of a layer."""
    hidden, inside, width = config.hidden_size, config.intermediate_size, share.width
    own, every = share.tokens / share.tensor, config.num_experts
    experts, rows = every // share.experts, own * config.experts_per_token
    scores = (Weight("ffn.router.weight", (every, hidden)), Weight("ffn.router.bias", (every,)))
    matrices = {"gate_proj": (hidden, inside), "up_proj": (hidden, inside), "down_proj": (inside, hidden)}
    biases = {"gate_bias": (inside,), "up_bias": (inside,), "down_bias": (hidden,)}
    banks = tuple(
        Weight(f"ffn.experts.{name}", (experts, *shape), "bank") for name, shape in (matrices | biases).items()
    )
    sent = dispatch(own, every, config.experts_per_token, hidden, share.experts, width)
    multiplied, gated = grouped_swiglu(rows, hidden, inside, experts, width, compiled=share.compiled, weights=banks)
    # Adding biases reads and writes each product's output once more; the sums are kept for the gate's backward.
    biased = OpCost(
        "biases",
        "memory",
        traffic=3 * width * rows * (2 * inside + hidden),
        backward_traffic=width * rows * (2 * inside + hidden),
        kept=8 * rows,
    )
    gate = replace(gated, kept=2 * width * rows * inside)
    ops = (
        OpCost("ffn input", "memory", kept=width * own * hidden),
        *router(own, hidden, every, width, weights=scores),
        permutation(own, rows, hidden, width),
        multiplied,
        biased,
        gate,
        *sent.ops,
    )
    return FeedForwardCost(
        "layer with experts",
        ops,
        sum(weight.numbers for weight in scores),
        sum(weight.numbers for weight in banks),
        2 * width * rows * (hidden + inside) + sent.workspace,
        sent.exchanges,
        sent.backward_exchanges,
    )

"""Costs of Qwen3 models. Imports no torch."""

from __future__ import annotations

from d9d_core.cost import OpCost, Share, StageCost, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_moe.costs import dispatch, grouped_swiglu, permutation, router
from d9d_nn.decoder.costs import FeedForwardCost, decoder_cost, dense_cost, swiglu_cost

from d9d_qwen3.moe_config import AnyQwen3Config, Qwen3MoeConfig


def stage_cost(config: AnyQwen3Config, stage: Stage, share: Share) -> StageCost:
    """Cost of a pipeline stage of a Qwen3 model.

    Raises:
        BuildError: the ranks cannot shard the stage.
    """
    if not isinstance(config, Qwen3MoeConfig):
        return dense_cost(config, stage, share, head_norms=True)
    if config.num_experts % share.experts:
        raise BuildError(
            f"mesh.ep is {share.experts}, which does not divide {config.num_experts} experts; use a divisor"
        )
    return decoder_cost(config, stage, share, feed_forward, head_norms=True)


def feed_forward(config: Qwen3MoeConfig, layer: int, share: Share) -> FeedForwardCost:
    """Cost of the router and the experts of a layer, or of the SwiGLU of a dense layer."""
    if not config.has_experts(layer):
        return swiglu_cost(config, layer, share)
    hidden, inside, width = config.hidden_size, config.moe_intermediate_size, share.width
    own = share.tokens / share.tensor
    experts, rows = config.num_experts // share.experts, own * config.experts_per_token
    scores = (Weight("ffn.router.weight", (config.num_experts, hidden)),)
    shapes = {"gate_proj": (hidden, inside), "up_proj": (hidden, inside), "down_proj": (inside, hidden)}
    banks = tuple(Weight(f"ffn.experts.{name}", (experts, *shape), "bank") for name, shape in shapes.items())
    sent = dispatch(own, config.num_experts, config.experts_per_token, hidden, share.experts, width)
    ops = (
        OpCost("ffn input", "memory", kept=width * own * hidden),
        *router(own, hidden, config.num_experts, width, weights=scores),
        permutation(own, rows, hidden, width),
        *grouped_swiglu(rows, hidden, inside, experts, width, compiled=share.compiled, weights=banks),
        *sent.ops,
    )
    return FeedForwardCost(
        "layer with experts",
        ops,
        hidden * config.num_experts,
        3 * experts * hidden * inside,
        # Workspace of the experts' outputs and their gradients, and of gate and up.
        2 * width * rows * (hidden + inside) + sent.workspace,
        sent.exchanges,
        sent.backward_exchanges,
    )

"""Costs of Gated DeltaNet and of shared experts, by hand."""

from __future__ import annotations

from typing import Any

import pytest
from d9d_core.cost import Exchange, OpCost, Share
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_core.model import Stage
from d9d_nn.costs import silu_mul
from d9d_qwen3.costs import feed_forward
from d9d_qwen3_next.config import AnyConfig, Qwen3NextConfig, tiny, tiny_dense
from d9d_qwen3_next.costs import stage_cost

#: 2 samples of 16 positions, 2 bytes, on one of two ranks of tp.
TOKENS, SIZES = 32, {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
SIZES |= {"linear_value_head_dim": 12, "linear_conv_kernel_dim": 3, "hidden_size": 32}
KEYS, VALUES, HEADS = 8, 24, 2


def changed(config: AnyConfig, **fields: Any) -> AnyConfig:
    return type(config).model_validate(config.model_dump() | SIZES | fields)


def ops_of(**share: Any) -> dict[str, OpCost]:
    config = changed(tiny_dense(), layer_types=("linear_attention",))
    return {op.name: op for op in stage_cost(config, Stage(), Share(2, 16, tensor=2, **share)).blocks[1].ops}


def test_projections_and_filters_of_gated_deltanet_are_split_by_heads() -> None:
    ops = ops_of()
    into, out = ops["query, key, value, gates"], ops["output"]
    assert {weight.name.removeprefix("attention."): (weight.shape, weight.cut) for weight in into.weights} == {
        "q_proj.weight": ((KEYS, 32), 0), "k_proj.weight": ((KEYS, 32), 0), "v_proj.weight": ((VALUES, 32), 0),
        "gate_proj.weight": ((VALUES, 32), 0), "decay_proj.weight": ((HEADS, 32), 0),
        "beta_proj.weight": ((HEADS, 32), 0),
    }  # fmt: skip
    assert into.flops == 2 * TOKENS * 32 * (2 * KEYS + 2 * VALUES + 2 * HEADS)
    assert (out.flops, out.weights[0].shape, out.weights[0].cut) == (2 * TOKENS * VALUES * 32, (32, VALUES), 1)
    filters = ops["short convolutions"]
    assert {weight.name.removeprefix("attention."): (weight.shape, weight.cut) for weight in filters.weights} == {
        "q_conv.weight": ((KEYS, 3), 0), "k_conv.weight": ((KEYS, 3), 0), "v_conv.weight": ((VALUES, 3), 0),
    }  # fmt: skip
    rule = ops["gated delta rule"]
    assert {weight.name: (weight.shape, weight.cut) for weight in rule.weights} == {
        "attention.decay.A_log": ((HEADS,), 0), "attention.decay.dt_bias": ((HEADS,), 0)
    }  # fmt: skip
    (norm,) = ops["gated norm"].weights
    assert (norm.name, norm.shape, norm.cut) == ("attention.norm.weight", (12,), None)


@pytest.mark.parametrize("compiled", [False, True])
def test_memory_traffic_of_gated_deltanet(compiled: bool) -> None:
    ops = ops_of(compiled=compiled)
    convolved, values = 2 * TOKENS * (2 * KEYS + VALUES), 2 * TOKENS * VALUES
    filters, norm = ops["short convolutions"], ops["gated norm"]
    passes = 2 if compiled else 12
    assert (filters.traffic, filters.backward_traffic) == (passes * convolved, 2 * passes * convolved)
    assert (filters.kept, filters.rows) == ((2 if compiled else 4) * convolved, TOKENS)
    assert (norm.traffic, norm.backward_traffic, norm.rows) == (3 * values, 5 * values, TOKENS)
    assert norm.kept == (2 if compiled else 8) * values


def test_the_rule_computes_on_values_with_the_features_of_a_key_under_context_parallelism() -> None:
    for context, of_value in ((1, 12), (2, 20)):
        rule = ops_of(context=context)["gated delta rule"]
        products = 64 * (2 * 8 + of_value) + 8 * (3 * of_value + 8) + 64 * of_value / 64
        assert rule.flops == rule.rows * HEADS * (2 * products + 64 * (8 + of_value))
        assert rule.backward_flops == 2 * rule.flops
        assert rule.kept == 4 * rule.rows * HEADS * (10 * 8 + 7 * of_value + 7 * 64 + 8 * (8 + 2 * of_value) / 64)
        assert (rule.traffic, rule.backward_traffic) == (2 * rule.kept, 4 * rule.kept)


@pytest.mark.parametrize("context", [1, 2])
def test_a_kernel_of_the_rule_keeps_inverses_of_chunks_and_no_intermediates(context: int) -> None:
    asked: list[OpSignature] = []

    def chosen(signature: OpSignature) -> str:
        asked.append(signature)
        return "triton"

    rule, plain = (ops_of(context=context, **more)["gated delta rule"] for more in ({"kernels": chosen}, {}))
    of_value, rows = 12 if context == 1 else 20, TOKENS / context * HEADS
    assert rule.kept == rows * (2 * 65 + 4) + (0 if context == 1 else rows * 6 * of_value)
    assert (rule.traffic, rule.backward_traffic) == tuple(2 * rows * (8 + of_value) * passes for passes in (16, 52))
    assert (rule.flops, rule.weights) == (plain.flops, plain.weights)
    facts = {"key_heads": 1, "value_heads": HEADS, "key_dim": 8, "value_dim": of_value}
    op = "gated_delta_rule" if context == 1 else "gated_delta_rule_from"
    assert asked == [OpSignature(op, "cuda", "bfloat16", facts)]
    for backend in ("reference", "chunked"):
        assert ops_of(context=context, kernels=lambda _, name=backend: name)["gated delta rule"] == plain


def test_ranks_of_context_parallelism_exchange_ends_of_convolutions_and_states() -> None:
    config = changed(tiny_dense(), layer_types=("linear_attention",))
    block = stage_cost(config, Stage(), Share(2, 16, context=4)).blocks[1]
    gathered = 2 * 2 * 4  # each rank of four has two stretches of each of the two samples
    sizes = (2 * gathered * 2 * (2 * 16 + 48), 4 * gathered * 4 * 8 * (8 + 12))
    assert block.exchanges == tuple(Exchange("all_gather", "cp", size) for size in sizes)
    assert block.backward_exchanges == tuple(Exchange("reduce_scatter", "cp", size) for size in sizes)


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_shared_expert_costs_its_products_and_its_gate(tensor: int) -> None:
    config = changed(tiny(), shared_expert_intermediate_size=20)
    assert isinstance(config, Qwen3NextConfig)
    share = Share(2, 16, tensor=tensor)
    block = stage_cost(config, Stage(), share).blocks[1]
    own, inside = TOKENS / tensor, 20 // tensor
    into, product, out, gate, gated = block.ops[-5:]
    assert (into.flops, [weight.shape for weight in into.weights]) == (2 * TOKENS * 32 * 2 * inside, [(inside, 32)] * 2)
    assert [weight.cut for weight in (*into.weights, *out.weights, *gate.weights)] == [0, 0, 1, None]
    assert into.kept == (2 * TOKENS * 32 if tensor > 1 else 0)
    assert (out.flops, out.weights[0].shape) == (2 * TOKENS * inside * 32, (32, inside))
    assert (gate.flops, gate.weights[0].shape, gate.kept) == (2 * own * 32, (1, 32), 0)
    assert (gated.traffic, gated.backward_traffic, gated.kept) == (10 * own * 32, 10 * own * 32, 2 * own * 32)
    assert product == silu_mul(TOKENS, inside, 2, compiled=False)
    routed = feed_forward(config, 0, share)
    assert block.ops[-5 - len(routed.ops) : -5] == routed.ops


def test_ranks_that_do_not_divide_experts_or_features_are_refused() -> None:
    config = changed(tiny(), shared_expert_intermediate_size=21)
    with pytest.raises(BuildError, match="mesh.tp is 2, which does not divide shared_expert_intermediate_size 21"):
        stage_cost(config, Stage(), Share(2, 16, tensor=2))
    with pytest.raises(BuildError, match="mesh.ep is 3, which does not divide 4 experts; use a divisor"):
        stage_cost(changed(tiny(), num_experts=4), Stage(), Share(2, 16, experts=3))

"""Costs of ops and decoders, with numbers by hand. Each size has another prime factor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.cost import AttentionShape, Exchange, OpCost, Share, Weight
from d9d_core.errors import BuildError
from d9d_core.model import Stage
from d9d_nn import costs
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.decoder.config import DenseConfig, keys_of
from d9d_nn.decoder.costs import (
    FeedForwardCost,
    attention_cost,
    decoder_cost,
    dense_cost,
    sequence_exchanges,
    state_bytes,
    swiglu_cost,
)
from d9d_nn.decoder.flops import head_parameters, layer_parameters, training_flops_per_token
from d9d_nn.decoder.stages import layers_of
from d9d_nn.rope.rotary_embedding import Rotation
from torch import Tensor, nn
from torch.nn import functional

WEIGHTS = (Weight("w", (2, 3)),)


def test_a_linear_layer_has_one_product_forward_and_two_backward() -> None:
    assert costs.linear("x", 3, 5, 7, 2, weights=WEIGHTS) == OpCost(
        "x", "product", 210, 420, 2 * (3 * 12 + 35), 4 * (3 * 12 + 35), 30, 3, WEIGHTS
    )
    assert costs.linear("x", 3, 5, 7, 2, keeps_input=False).kept == 0


def test_norms_and_rotations_are_bound_by_memory() -> None:
    assert costs.rms_norm("x", 3, 5, 2, weights=WEIGHTS) == OpCost(
        "x", "memory", traffic=120, backward_traffic=150, kept=30 + 12, rows=3, weights=WEIGHTS
    )
    assert costs.rotated_heads(3, 5, 7, 2, weights=WEIGHTS) == OpCost(
        "head norms, rope", "memory", traffic=420, backward_traffic=630, kept=210 + 60, rows=3, weights=WEIGHTS
    )
    assert costs.rotation(3, 5, 7, 2) == OpCost("rope", "memory", traffic=420, backward_traffic=420, rows=3)


def test_attention_has_five_products_backward_for_two_forward() -> None:
    found = costs.attention(3, 11, 5, 2, 7, 2)
    flops, size = 4 * 3 * 11 * 5 * 7, 2 * 3 * 7 * 14
    assert found == OpCost(
        "attention", "attention", flops, 2.5 * flops, size, 2 * size, size + 60, attention=AttentionShape(3, 5, 2, 7, 2)
    )
    assert found.attended == 3 * 5 * (2 * 7 + 4)


def test_a_compiled_gate_is_recomputed_and_a_plain_one_kept() -> None:
    assert costs.silu_mul(3, 5, 2, compiled=True) == OpCost(
        "silu_mul", "memory", traffic=90, backward_traffic=180, kept=60
    )
    assert costs.silu_mul(3, 5, 2, compiled=False) == OpCost(
        "silu_mul", "memory", traffic=150, backward_traffic=240, kept=120
    )


def test_the_gradient_of_an_embedding_is_dense() -> None:
    assert costs.embedding(3, 11, 5, 2, weights=WEIGHTS) == OpCost(
        "embedding", "memory", traffic=60, backward_traffic=90 + 220, kept=24, rows=3, weights=WEIGHTS
    )


def test_logits_that_fit_are_kept_and_others_recomputed() -> None:
    logits, flops, inputs = 2 * 3 * 11, 2 * 3 * 5 * 11, 2 * (15 + 55)
    (product, loss), workspace = costs.linear_cross_entropy(3, 5, 11, 2, 1e9, weights=WEIGHTS)
    assert product == OpCost(
        "head", "product", flops, 2 * flops, inputs + logits, 2 * inputs + 2 * logits, logits + 30, 3, WEIGHTS, 110, 0.0
    )
    assert loss == OpCost("loss", "memory", traffic=logits, backward_traffic=2 * logits, kept=36)
    assert workspace == 110 + 30
    # A twentieth of the memory holds a third of the logits: the other two thirds are computed again.
    (product, _), workspace = costs.linear_cross_entropy(3, 5, 11, 2, 20 * 22)
    assert product.backward_flops == pytest.approx(flops * (2 + 2 / 3))
    assert product.backward_traffic == pytest.approx(2 * inputs + (2 + 2 / 3) * logits)
    assert product.kept == 22 + 30
    assert product.workspace == 4 * 55
    assert workspace == 44 + 220 + 30


def test_chunks_of_logits_have_at_most_a_gibibyte() -> None:
    rows, words = 2**20, 2**11  # 4 GiB of logits in bfloat16
    (product, _), workspace = costs.linear_cross_entropy(rows, 1, words, 2, 20 * 2**31)
    assert product.kept == 2**31 + 2 * rows
    assert product.kept_for_weights == 2**30
    assert workspace == 2**30 + 4 * words + 2 * rows
    (product, _), _ = costs.linear_cross_entropy(0, 1, 0, 2, 1.0)
    assert product.backward_flops == 0


# --- decoders ---------------------------------------------------------------------------------------------------------

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 8, "num_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 6, "intermediate_size": 10,
}  # fmt: skip


class Config(DenseConfig):
    name: str = "dense"


def config(**changes: Any) -> Config:
    return Config(**{**SIZES, **changes})


def test_operations_of_a_token_are_those_of_its_matrices_and_of_attention() -> None:
    layer = 8 * 2 * (4 + 2) * 6 + 3 * 8 * 10
    assert layer_parameters(config()) == 3 * layer
    assert training_flops_per_token(config(), 16) == 6 * (3 * layer + 8 * 101) + 12 * 4 * 6 * 3 * 8
    assert training_flops_per_token(config(sliding_window=4, sliding_from_layer=1), 16) == 6 * (
        3 * layer + 8 * 101
    ) + 12 * 4 * 6 * (8 + 2 * (8 - 144 / 32))


def test_heads_that_run_once_per_sample_count_in_proportion() -> None:
    heads = {
        "a": {"kind": "causal_lm"},
        "b": {"kind": "classification", "num_classes": 5},
        "c": {"kind": "token_classification", "num_classes": 7},
        "d": {"kind": "embedding"},
    }
    assert head_parameters(config(heads=heads), 4) == 8 * (101 + 7 + 5 / 4)
    assert head_parameters(config(heads={"d": {"kind": "embedding"}}), 4) == 0
    assert head_parameters(config(heads={"d": {"kind": "embedding", "projection": 6}}), 4) == 8 * 6 / 4


@pytest.mark.parametrize(("window", "keys"), [(None, 5.0), (10, 5.0), (20, 5.0), (4, 5 - 36 / 20), (1, 5 - 81 / 20)])
def test_a_window_leaves_out_the_triangle_of_far_keys(window: int | None, keys: float) -> None:
    assert keys_of(window, 10) == pytest.approx(keys)


def test_layers_are_divided_by_cost_with_the_head_in_the_last_stage() -> None:
    plain = config(num_layers=8, heads={"d": {"kind": "embedding"}}, vocab_size=2)
    assert [layers_of(plain, Stage(index, 2)) for index in range(2)] == [range(4), range(4, 8)]
    # A layer has 816 matrix elements; a head over 306 words costs three layers, the embedding 3/16 of a layer.
    large = config(num_layers=9, vocab_size=306)
    assert [layers_of(large, Stage(index, 2)) for index in range(2)] == [range(6), range(6, 9)]
    # Without the cost of the embedding, the first of two stages would have the surplus layer.
    huge = config(num_layers=3, vocab_size=16 * 102 * 2, heads={"d": {"kind": "embedding"}})
    assert [layers_of(huge, Stage(index, 2)) for index in range(2)] == [range(1), range(1, 3)]


def test_the_feed_forward_part_is_split_over_ranks() -> None:
    share = Share(2, 12, tensor=2, width=2, compiled=True)
    found = swiglu_cost(config(), 0, share)
    into = (Weight("ffn.gate_proj.weight", (5, 8), "linear", 0), Weight("ffn.up_proj.weight", (5, 8), "linear", 0))
    out_of = (Weight("ffn.down_proj.weight", (8, 5), "linear", 1),)
    around = (Exchange("all_gather", "tp", 2 * 24 * 8), Exchange("reduce_scatter", "tp", 2 * 24 * 8))
    assert found == FeedForwardCost(
        "layer",
        (
            costs.linear("gate, up", 24, 8, 10, 2, weights=into),
            costs.silu_mul(24, 5, 2, compiled=True),
            costs.linear("down", 24, 5, 8, 2, keeps_input=False, weights=out_of),
        ),
        120,
        0,
        2 * 2 * 24 * 5,
        around,
        around,
    )
    assert sequence_exchanges(config(), share) == around
    assert sequence_exchanges(config(), Share(2, 12)) == ()
    assert state_bytes(config(), Share(2, 12, tensor=3, context=2)) == 2 * 12 / 3 * 8


def test_a_whole_model_has_an_embedding_layers_and_heads() -> None:
    share = Share(2, 12, memory=1e9)
    found = dense_cost(config(), Stage(), share, head_norms=True)
    embedding, layer, heads = found.blocks
    assert (found.boundary, layer.count, layer.names) == (0.0, 3, ("layers.0", "layers.1", "layers.2"))
    table = Weight("embedding.weight", (101, 8), "embedding", 0)
    assert embedding.ops == (costs.embedding(24, 101, 8, 2, weights=(table,)),)
    assert (embedding.parameters, embedding.is_block, embedding.exchanges) == (808, False, ())
    norms = [
        costs.rms_norm(name, 24, 8, 2, weights=(Weight(f"{name}.weight", (8,)),))
        for name in ("attention_norm", "ffn_norm")
    ]
    of_heads = (Weight("attention.q_norm.weight", (6,)), Weight("attention.k_norm.weight", (6,)))
    into = tuple(
        Weight(f"attention.{name}.weight", (size, 8), "linear", 0)
        for name, size in (("q_proj", 24), ("k_proj", 12), ("v_proj", 12))
    )
    out_of = (Weight("attention.o_proj.weight", (8, 24), "linear", 1),)
    feed_forward = swiglu_cost(config(), 0, share)
    assert layer.ops == (
        norms[0],
        costs.linear("query, key, value", 24, 8, 48, 2, weights=into),
        costs.rotated_heads(24, 6, 6, 2, weights=of_heads),
        costs.attention(24, 6.0, 4, 2, 6, 2),
        costs.linear("output", 24, 24, 8, 2, keeps_input=False, weights=out_of),
        norms[1],
        *feed_forward.ops,
    )
    assert layer.parameters == 8 * 48 + 2 * 6 + 8 * 24 + 2 * 8 + 240
    assert (layer.input, layer.workspace) == (384.0, 3 * 384 + feed_forward.workspace)
    assert (layer.exchanges, layer.is_block, layer.expert_parameters) == ((), True, 0)
    (product, loss), workspace = costs.linear_cross_entropy(
        24, 8, 101, 2, 1e9, weights=(Weight("heads.causal_lm.weight", (101, 8), "head", 0),)
    )
    norm = costs.rms_norm("norm", 24, 8, 2, weights=(Weight("norm.weight", (8,)),))
    assert heads.ops == (norm, product, loss)
    assert (heads.parameters, heads.workspace, heads.is_block, heads.exchanges) == (816, workspace, False, ())
    plain = dense_cost(config(), Stage(), share, head_norms=False).blocks[1]
    assert plain.ops[2] == costs.rotation(24, 6, 6, 2)
    assert plain.parameters == layer.parameters - 12


def test_ranks_of_tensor_parallelism_have_a_part_of_each_matrix_and_exchange_positions() -> None:
    share = Share(2, 12, tensor=4)
    found = dense_cost(config(num_attention_heads=8, intermediate_size=12), Stage(), share, head_norms=False)
    embedding, layer, heads = found.blocks
    gather, scatter = Exchange("all_gather", "tp", 384.0), Exchange("reduce_scatter", "tp", 384.0)
    assert (embedding.parameters, embedding.exchanges, embedding.backward_exchanges) == (26 * 8, (scatter,), (gather,))
    assert (heads.parameters, heads.exchanges, heads.backward_exchanges) == (27 * 8, (gather,), (scatter,))
    assert (layer.exchanges, layer.backward_exchanges) == ((gather, scatter) * 2, (gather, scatter) * 2)
    # Two ranks compute the same one of two key heads, from the whole weight: tensor_parallel does not split it.
    assert layer.ops[1].weights == (
        Weight("attention.q_proj.weight", (12, 8), "linear", 0),
        Weight("attention.k_proj.weight", (12, 8), "linear"),
        Weight("attention.v_proj.weight", (12, 8), "linear"),
    )
    assert layer.ops[1].flops == 2 * 24 * 8 * (12 + 6 + 6)
    assert layer.ops[3].attention == AttentionShape(24, 2.0, 1, 6, 2)
    assert (layer.ops[0].rows, heads.ops[0].rows, layer.input) == (6.0, 6.0, 96.0)


def test_stages_hold_their_layers_and_send_the_residual_stream() -> None:
    share = Share(2, 12)
    first = dense_cost(config(num_layers=2), Stage(0, 2), share, head_norms=False)
    last = dense_cost(config(num_layers=2), Stage(1, 2), share, head_norms=False)
    assert [block.name for block in first.blocks] == ["embedding", "layer"]
    assert [block.name for block in last.blocks] == ["layer", "norm and heads"]
    assert (first.boundary, last.boundary) == (384.0, 0.0)
    assert (first.blocks[1].names, last.blocks[0].names) == (("layers.0",), ("layers.1",))


def test_layers_of_each_kind_are_one_block() -> None:
    found = dense_cost(
        config(num_layers=4, sliding_window=4, sliding_from_layer=1), Stage(), Share(1, 12), head_norms=False
    )
    full, sliding = found.blocks[1:-1]
    assert (full.names, full.count) == (("layers.0",), 1)
    assert (sliding.names, sliding.count) == (("layers.1", "layers.2", "layers.3"), 3)
    assert full.ops[3].flops == 4 * 12 * 6 * 4 * 6
    assert sliding.ops[3].flops == pytest.approx(4 * 12 * (6 - 64 / 24) * 4 * 6)


def test_tied_heads_have_their_own_weight_only_on_another_stage_than_the_embedding() -> None:
    share = Share(2, 12)
    alone = dense_cost(config(tie_embeddings=True), Stage(), share, head_norms=False).blocks[-1]
    assert alone.parameters == 8
    assert alone.ops[1].weights == (Weight("embedding.weight", (101, 8), "head", 0),)
    apart = dense_cost(config(num_layers=2, tie_embeddings=True), Stage(1, 2), share, head_norms=False).blocks[-1]
    assert apart.parameters == 8 + 808


def test_classifiers_of_samples_and_of_tokens_have_their_own_rows() -> None:
    heads = {
        "b": {"kind": "classification", "num_classes": 5},
        "c": {"kind": "token_classification", "num_classes": 7},
        "d": {"kind": "embedding"},
        "e": {"kind": "embedding", "projection": 6},
    }
    found = dense_cost(config(heads=heads), Stage(), Share(2, 12), head_norms=False).blocks[-1]
    of_samples, of_tokens, mapped = found.ops[1:]
    assert mapped == costs.linear("classes", 2, 8, 6, 2, weights=(Weight("heads.e.weight", (6, 8)),))
    assert of_samples == costs.linear("classes", 2, 8, 5, 2, weights=(Weight("heads.b.weight", (5, 8)),))
    assert of_tokens == costs.linear(
        "classes", 24, 8, 7, 2, weights=(Weight("heads.c.weight", (7, 8)), Weight("heads.c.bias", (7,)))
    )
    assert (found.parameters, found.workspace) == (8 + 40 + 63 + 48, 0.0)


def test_biases_of_attention_are_split_with_their_outputs() -> None:
    layer = dense_cost(config(attention_bias=True), Stage(), Share(2, 12), head_norms=False).blocks[1]
    assert [(weight.name, weight.shape, weight.cut) for op in layer.ops[1:5] for weight in op.weights] == [
        ("attention.q_proj.weight", (24, 8), 0),
        ("attention.q_proj.bias", (24,), 0),
        ("attention.k_proj.weight", (12, 8), 0),
        ("attention.k_proj.bias", (12,), 0),
        ("attention.v_proj.weight", (12, 8), 0),
        ("attention.v_proj.bias", (12,), 0),
        ("attention.o_proj.weight", (8, 24), 1),
        ("attention.o_proj.bias", (8,), None),
    ]


@pytest.mark.parametrize(
    ("changes", "share", "said"),
    [
        ({}, Share(1, 12, tensor=3), "mesh.tp is 3, which does not divide the 4 query heads; choose a divisor"),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 12},
            Share(1, 12, tensor=6),
            "mesh.tp is 6, neither a divisor nor a multiple of the 4 key and value heads; choose one",
        ),
        (
            {"intermediate_size": 9},
            Share(1, 12, tensor=2),
            "mesh.tp is 2, which does not divide intermediate_size 9; choose a divisor",
        ),
        (
            {},
            Share(1, 12, tensor=4, context=2),
            "mesh.tp x mesh.cp = 4 x 2 does not divide the 12 positions of a sample",
        ),
        ({}, Share(1, 12, experts=2), "mesh.ep is 2, but the model has no experts; remove mesh.ep"),
    ],
)
def test_sizes_that_ranks_cannot_split_are_refused(changes: Any, share: Share, said: str) -> None:
    with pytest.raises(BuildError) as caught:
        dense_cost(config(**changes), Stage(), share, head_norms=False)
    assert str(caught.value) == said


def test_feed_forward_parts_of_a_family_are_asked_for_the_first_layer_of_a_kind() -> None:
    asked: list[Any] = []

    def feed_forward(of: Any, layer: int, share: Share) -> FeedForwardCost:
        asked.append((of, layer, share))
        back = (Exchange("all_to_all", "ep", 3.0),)
        return FeedForwardCost("sparse", (), 5, 7, 11.0, (), back)

    share, made = Share(1, 12), config()
    block = decoder_cost(made, Stage(), share, feed_forward, head_norms=False).blocks[1]
    assert asked == [(made, 0, share)]
    assert (block.name, block.expert_parameters, block.workspace) == ("sparse", 7, 3 * 192 + 11.0)
    assert (block.exchanges, block.backward_exchanges) == ((), (Exchange("all_to_all", "ep", 3.0),))
    assert block.parameters == 8 * 48 + 8 * 24 + 16 + 5


class FusedCore(nn.Module):
    """Core of attention that saves queries, keys, values, output and log-sum-exps, as fused kernels do."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, _documents: None) -> Tensor:
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)


def saved_bytes(*, output_gate: bool, head_norms: bool) -> int:
    """Bytes of memory that an attention layer keeps for its backward; views of one tensor count once."""
    settings: dict[str, Any] = {"query_heads": 2, "key_value_heads": 1, "head_dim": 4, "std": 0.1, "output_std": 0.1}
    eps = 1e-6 if head_norms else None
    layer = GroupedQueryAttention(8, **settings, head_norm_eps=eps, output_gate=output_gate)
    layer.core = FusedCore()  # type: ignore[assignment]
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    found: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[storage.data_ptr()] = storage  # held, so that no other tensor gets its address
        return tensor

    hidden, angles = torch.randn(2, 12, 8, requires_grad=True), torch.randn(1, 12, 2)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(hidden, Rotation(angles.cos(), angles.sin()), None)
    return sum(storage.nbytes() for pointer, storage in found.items() if pointer not in weights)


@pytest.mark.parametrize(("head_norms", "tensors"), [(False, 2), (True, 3)])
def test_a_gate_of_attention_keeps_what_autograd_saves(head_norms: bool, tensors: int) -> None:
    """Sigmoid and gated output; norms of query heads keep the whole projection, in which the gate is."""
    share, size = Share(2, 12, width=4), 4 * 24 * 2 * 4
    gated, plain = (
        sum(op.kept for op in attention_cost(small, 0, share, head_norms=head_norms, output_gate=gate).ops)
        for small in (config(head_dim=4, num_attention_heads=2, num_key_value_heads=1),)
        for gate in (True, False)
    )
    measured = [saved_bytes(output_gate=gate, head_norms=head_norms) for gate in (True, False)]
    assert gated - plain == measured[0] - measured[1] == tensors * size

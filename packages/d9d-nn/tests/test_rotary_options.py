"""Rotation of a part of each head, and of neighbouring features, against complex numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.ops.attention.reference import visible
from d9d_nn.rope.rotary_embedding import LayerRotations, RotaryEmbedding
from d9d_nn.rope.scaling import Rope
from torch import Tensor
from torch.nn import functional

HEADS, KEY_HEADS, FEATURES, HIDDEN, POSITIONS = 4, 2, 8, 16, 9
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * POSITIONS])


def module(**options: Any) -> GroupedQueryAttention:
    torch.manual_seed(0)
    attention = GroupedQueryAttention(
        HIDDEN, query_heads=HEADS, key_value_heads=KEY_HEADS, head_dim=FEATURES, std=0.5, output_std=0.5, **options
    )
    for layer in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        layer.reset_parameters()
    return attention


def rotated(heads: Tensor, count: int, interleaved: bool) -> Tensor:
    """Heads [B, S, N, D] whose first ``count`` features are complex numbers, times exp(i position theta ** (-2 j / R)).

    Su et al. 2021, equation 12; the pairs of the other layout are in halves.
    """
    part, rest = heads[..., :count], heads[..., count:]
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).transpose(-1, -2)
    angles = torch.arange(POSITIONS)[:, None].double() * 100.0 ** (-torch.arange(0, count, 2).double() / count)
    turned = torch.view_as_complex(pairs.double().contiguous()) * torch.polar(torch.ones_like(angles), angles)[:, None]
    pairs = torch.view_as_real(turned)
    part = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((part, rest.double()), dim=-1)


def expected(attention: GroupedQueryAttention, hidden: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    def heads(layer: Any, norm: Any = None) -> Tensor:
        found = layer(hidden).unflatten(-1, (-1, FEATURES))
        return functional.rms_norm(found, (FEATURES,), norm.weight, 1e-6) if norm is not None else found

    count, interleaved = attention.rotary_dim, attention.interleaved
    query = rotated(heads(attention.q_proj, attention.q_norm), count, interleaved)
    key = rotated(heads(attention.k_proj, attention.k_norm), count, interleaved).repeat_interleave(2, dim=2)
    value = heads(attention.v_proj).repeat_interleave(2, dim=2).double()
    scores = torch.einsum("bsnd,btnd->bnst", query, key) / math.sqrt(FEATURES)
    seen = visible(POSITIONS, documents, torch.device("cpu"), window)
    scores = scores.masked_fill(~(seen if documents is None else seen[:, None]), -math.inf)
    mixed = torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), value)
    return attention.o_proj(mixed.flatten(2).float())  # type: ignore[no-any-return]


@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("count", "interleaved"), [(8, False), (8, True), (4, False), (4, True), (6, True), (2, False), (2, True)]
)
def test_a_part_of_each_head_rotates_by_its_own_angles(
    count: int, interleaved: bool, window: int | None, norms: bool, documents: Tensor | None
) -> None:
    options = {"head_norm_eps": 1e-6} if norms else {}
    attention = module(rotary_dim=count, interleaved=interleaved, window=window, **options)
    if attention.q_norm is not None:
        torch.nn.init.uniform_(attention.q_norm.weight, 0.5, 2.0)
    hidden = torch.randn(2, POSITIONS, HIDDEN, requires_grad=True)
    rotation = RotaryEmbedding(count, theta=100.0)(torch.arange(POSITIONS).unsqueeze(0))
    found, wanted = attention(hidden, rotation, documents), expected(attention, hidden, documents, window)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    weights = torch.arange(float(found.numel())).view_as(found) / found.numel()
    trained = [hidden, *attention.parameters()]
    for a, b in zip(
        torch.autograd.grad((found * weights).sum(), trained),
        torch.autograd.grad((wanted * weights).sum(), trained),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_all_features_rotate_by_default() -> None:
    assert (module().rotary_dim, module().interleaved) == (FEATURES, False)


def test_ops_that_rotate_whole_heads_by_halves_are_offered_only_for_such_heads() -> None:
    assert set(module(head_norm_eps=1e-6).op_slots()) == {"rope", "normed_rope", "attention_inputs"}
    for options in ({"rotary_dim": 4}, {"interleaved": True}):
        attention = module(head_norm_eps=1e-6, **options)
        assert set(attention.op_slots()) == {"rope"}
        assert attention.adjacent_weights() == []


def test_layers_with_other_numbers_of_rotated_features_have_their_own_rotation() -> None:
    ropes = [Rope(100.0), Rope(100.0, features=4), Rope(100.0)]
    whole, part, again = LayerRotations(FEATURES, ropes)(torch.arange(5).unsqueeze(0))
    assert whole is again
    assert (whole.cos.shape[-1], part.cos.shape[-1]) == (4, 2)
    torch.testing.assert_close(part.cos, RotaryEmbedding(4, theta=100.0)(torch.arange(5).unsqueeze(0)).cos)


def test_rotations_of_counted_positions_are_computed_once() -> None:
    rotations = LayerRotations(8, [Rope(1e4), Rope(1e6), Rope(1e4)])
    counted, other = torch.arange(6).unsqueeze(0), torch.tensor([[0, 1, 2, 0, 1, 2]])
    expected = [rotation.cos for rotation in rotations(counted)]

    def found(positions: torch.Tensor, **given: Any) -> list[torch.Tensor]:
        return [rotation.cos for rotation in rotations(positions, **given)]

    first = found(counted, counted=6)
    assert all(torch.equal(one, wanted) for one, wanted in zip(first, expected, strict=True))
    assert all(one is again for one, again in zip(first, found(counted, counted=6), strict=True))
    assert not torch.equal(found(other)[0], first[0])
    assert found(counted[:, :4], counted=4)[0].shape == (1, 4, 4)
    lengths = torch.tensor([3])
    assert found(counted, counted=6, lengths=lengths)[0] is not found(counted, counted=6, lengths=lengths)[0]


def test_rotations_of_evaluations_in_inference_mode_do_not_reach_a_training_step() -> None:
    rotations, positions = LayerRotations(8, [Rope(1e4)]), torch.arange(6).unsqueeze(0)
    with torch.inference_mode():
        rotations(positions, counted=6)
    weight = torch.ones(6, 4, requires_grad=True)
    (weight * rotations(positions, counted=6)[0].cos).sum().backward()
    assert weight.grad is not None

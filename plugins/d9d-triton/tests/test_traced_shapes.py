"""Shapes and dtypes that operators announce to a compiler, on the meta device; all sizes differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_triton import add_rms_norm, normed_rope, permutation, rms_norm, rope, silu_mul
from d9d_triton.joint import attention_inputs, swiglu
from d9d_triton.joint.products import joint_rows_gradient
from d9d_triton.linear_cross_entropy import narrow, operators, words
from torch import Tensor

WIDE, NARROW, INTEGER = torch.float32, torch.bfloat16, torch.int64


def meta(*shape: int, dtype: torch.dtype = NARROW) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def announced(found: Tensor | tuple[Tensor, ...]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    tensors = (found,) if isinstance(found, Tensor) else found
    assert all(tensor.is_contiguous() for tensor in tensors)
    return [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


HEADS = meta(2, 3, 5, 8), meta(2, 3, 4, 8, dtype=WIDE), meta(8), meta(8, dtype=WIDE), meta(1, 3, 4), meta(1, 3, 4)
QUERY, KEY = ((2, 3, 5, 8), NARROW), ((2, 3, 4, 8), WIDE)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: rms_norm.rms_norm(meta(2, 3, 8), meta(8), 1e-6), [((2, 3, 8), NARROW)]),
        (lambda: silu_mul.silu_mul(meta(2, 8), meta(2, 8, dtype=WIDE)), [((2, 8), WIDE)]),
        (
            lambda: silu_mul.silu_mul_backward(meta(2, 8), meta(2, 8), meta(2, 8, dtype=WIDE)),
            [((2, 8), NARROW), ((2, 8), WIDE)],
        ),
        (
            lambda: silu_mul.silu_mul_backward_beside(meta(3, 8), meta(3, 8), meta(3, 8)),
            [((3, 16), NARROW), ((3, 8), NARROW)],
        ),
        (lambda: rope.turn(*HEADS[:2], *HEADS[4:], False), [QUERY, KEY]),
        (lambda: normed_rope.forward(*HEADS, 1e-6), [QUERY, KEY]),
        (lambda: normed_rope.backward(*HEADS[:2], *HEADS, 1e-6), [QUERY, KEY, ((8,), NARROW), ((8,), WIDE)]),
        (
            lambda: permutation.copy_tokens(meta(3, 8), meta(5, dtype=INTEGER), meta(3, 2, dtype=INTEGER), True),
            [((5, 8), NARROW)],
        ),
        (lambda: permutation.sum_copies(meta(5, 8), meta(3, 2, dtype=INTEGER)), [((3, 8), NARROW)]),
        (
            lambda: permutation.plain_sum(meta(5, 8), meta(5, dtype=INTEGER), meta(3, 2, dtype=INTEGER), True),
            [((3, 8), NARROW)],
        ),
        (
            lambda: permutation.weighted_sum(meta(5, 8), meta(3, 2, dtype=INTEGER), meta(3, 2, dtype=WIDE), True),
            [((3, 8), NARROW)],
        ),
        (lambda: joint_rows_gradient(meta(3, 9), [meta(5, 8), meta(4, 8)]), [((3, 8), NARROW)]),
    ],
)  # fmt: skip
def test_results_have_the_shapes_of_their_arguments(call: Callable[[], Any], expected: Any) -> None:
    assert announced(call()) == expected


@pytest.mark.parametrize(("of_rows", "of_weight"), [(True, True), (True, False), (False, True)])
def test_gradients_that_nobody_needs_are_empty(of_rows: bool, of_weight: bool) -> None:
    x, weight = meta(2, 3, 8), meta(8, dtype=WIDE)
    rows, one = ((2, 3, 8) if of_rows else (0,)), ((8,) if of_weight else (0,))
    found = rms_norm.rms_norm_backward(x, x, weight, 1e-6, of_rows, of_weight)
    assert announced(found) == [(rows, NARROW), (one, WIDE), ((0,), NARROW)]
    found = rms_norm.rms_norm_backward(x, x, weight, 1e-6, of_rows, of_weight, x, torch.float16)
    assert announced(found)[2] == ((2, 3, 8), torch.float16)
    places, factors = meta(3, 2, dtype=INTEGER), meta(3, 2, dtype=WIDE)
    found = permutation.weighted_sum_backward(meta(3, 8), meta(5, 8), places, factors, True, of_rows, of_weight)
    rows, one = ((5, 8) if of_rows else (0,)), ((3, 2) if of_weight else (0,))
    assert announced(found) == [(rows, NARROW), (one, WIDE)]


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_a_sum_has_the_wider_dtype_and_its_norm_the_dtype_that_was_asked_for(dtype: torch.dtype | None) -> None:
    x, added, weight = meta(2, 3, 8, dtype=WIDE), meta(2, 3, 8), meta(8)
    found = add_rms_norm.add_and_normalise(x, added, weight, 1e-6, dtype)
    assert announced(found) == [((2, 3, 8), dtype or WIDE), ((2, 3, 8), WIDE)]
    found = add_rms_norm.add_and_normalise(added, None, weight, 1e-6, dtype)
    assert announced(found) == [((2, 3, 8), dtype or NARROW), ((0,), NARROW)]


def test_projections_are_announced_as_heads_and_their_gradients_side_by_side() -> None:
    x, norms, angles = meta(2, 3, 7), (meta(8), meta(8, dtype=WIDE)), (meta(1, 3, 4), meta(1, 3, 4))
    weights = meta(40, 7), meta(32, 7), meta(24, 7)
    query, key, value = (((2, 3, heads, 8), NARROW) for heads in (5, 4, 3))
    assert announced(attention_inputs._forward(x, *weights, *norms, *angles, 1e-6)) == [query, key, value, query, key]
    # Without the meta device, where the first call takes seconds.
    heads = [torch.empty(shape, dtype=dtype) for shape, dtype in (query, key, value, query, key)]
    norms, angles = (torch.ones(8, dtype=NARROW), torch.ones(8)), (torch.empty(1, 3, 4), torch.empty(1, 3, 4))
    found = attention_inputs._fake_backward(*heads, *norms, *angles, 1e-6)
    assert announced(found) == [((2, 3, 96), NARROW), ((8,), NARROW), ((8,), WIDE)]


def test_a_feed_forward_layer_is_announced_with_what_its_backward_reads() -> None:
    weights = meta(5, 8), meta(6, 8), meta(7, 5)
    found = torch.ops.d9d_triton.swiglu(meta(3, 8), *weights)
    assert announced(found) == [((3, 7), NARROW), ((3, 5), NARROW), ((3, 6), NARROW)]
    assert swiglu.build(None) is swiglu.swiglu  # type: ignore[arg-type] - no signature matters


# --- losses of 2 x 3 tokens of 5 features over 17 words, whose logits have 32 columns in memory

HIDDEN, WEIGHT, TARGETS = meta(2, 3, 5), meta(17, 5), meta(2, 3, dtype=INTEGER)
LOSSES, STATISTICS = ((2, 3), WIDE), ((2, 6), WIDE)


@pytest.mark.parametrize(("ranked", "ranks"), [(True, (2, 3)), (False, (0,))])
def test_losses_are_announced_with_their_statistics_and_kept_logits(ranked: bool, ranks: tuple[int, ...]) -> None:
    common = [LOSSES, (ranks, INTEGER), STATISTICS]
    found = operators.token_losses(HIDDEN, WEIGHT, TARGETS, 2, 4, ranked)
    assert announced(found) == [*common, ((4, 32), NARROW)]
    for keep, logits in ((True, 6), (False, 0)):
        found = words.token_losses_by_words(HIDDEN, WEIGHT, TARGETS, 100, keep, ranked)
        assert announced(found) == [*common, ((0 if ranked else logits, 32), NARROW)]


@pytest.mark.parametrize(("of_hidden", "of_weight"), [(True, True), (True, False), (False, True)])
def test_gradients_of_losses_are_announced_in_their_dtypes(of_hidden: bool, of_weight: bool) -> None:
    wants = of_hidden, of_weight
    hidden, weight = ((2, 3, 5) if of_hidden else (0,)), ((17, 5) if of_weight else (0,))
    common = [LOSSES, ((0,), INTEGER), STATISTICS]
    found = operators.token_losses_ahead(HIDDEN, WEIGHT, TARGETS, 2, False, *wants)
    assert announced(found) == [*common, (hidden, WIDE), (weight, WIDE)]
    found = narrow.token_losses_narrow(HIDDEN, WEIGHT, TARGETS, 2, False, *wants)
    assert announced(found) == [*common, (hidden, NARROW), (weight, NARROW)]
    grads, statistics, logits = meta(2, 3, dtype=WIDE), meta(2, 6, dtype=WIDE), meta(6, 32)
    found = operators.gradients(grads, HIDDEN, WEIGHT, TARGETS, statistics, logits, 2, *wants, WIDE)
    assert announced(found) == [(hidden, NARROW), (weight, WIDE)]
    found = words.gradients_by_words(grads, HIDDEN, WEIGHT, TARGETS, statistics, logits, 100, *wants)
    assert announced(found) == [(hidden, NARROW), (weight, NARROW)]
    found = operators._fake_scaled(grads, TARGETS, torch.empty(hidden), torch.empty(weight), NARROW)
    assert announced(found) == [(hidden, NARROW), (weight, NARROW)]

"""Small kernels against float64, as custom ops, and under a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_nn.ops import normed_rope as plain_normed_rope
from d9d_nn.ops import rms_norm as plain_rms_norm
from d9d_nn.ops import rope as plain_rope
from d9d_nn.ops import silu_mul as plain_silu_mul
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients, assert_close_values
from d9d_triton import normed_rope, rms_norm, rope, silu_mul
from d9d_triton.gradient_power import SumOfSquares
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
#: Powers of two and their neighbours: whole tiles, masked ones, and several rows in one.
FEATURES = st.sampled_from([1, 2, 3, 16, 17, 64, 100, 1025])


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def cos_sin(*shape: int) -> tuple[Tensor, Tensor]:
    angles = 5 * normal(*shape, seed=3)
    return angles.cos(), angles.sin()


def outcome(function: Callable[..., Any], *inputs: Tensor | float) -> dict[str, Tensor]:
    """Outputs of a function, and the gradients of all of its tensors."""
    leaves = [x.detach().requires_grad_() if isinstance(x, Tensor) else x for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.backward(outs, [normal(*out.shape, seed=9).to(out.dtype) for out in outs])
    grads = {f"gradient {place}": x.grad for place, x in enumerate(leaves) if isinstance(x, Tensor)}
    return {f"out {place}": out.detach() for place, out in enumerate(outs)} | grads


def wide(*inputs: Tensor | float) -> list[Tensor | float]:
    return [x.double() if isinstance(x, Tensor) else x for x in inputs]


def assert_near(found: dict[str, Tensor], exact: dict[str, Tensor], *dtypes: torch.dtype) -> None:
    """Near in the widest tolerance of the inputs."""
    within = max((TOLERANCES[dtype] for dtype in dtypes), key=lambda tolerance: tolerance.rtol)
    assert_close_gradients(found, exact, within)
    for name in (name for name in exact if name.startswith("out")):
        assert_close_values(found[name], exact[name], within, name)


@pytest.mark.full
@given(rows=st.integers(1, 70), features=FEATURES, dtype=st.sampled_from(DTYPES), of_weight=st.sampled_from(DTYPES))
@settings(max_examples=25)
def test_rms_norm_agrees_with_float64(rows: int, features: int, dtype: torch.dtype, of_weight: torch.dtype) -> None:
    inputs = normal(rows, features, dtype=dtype), 1 + normal(features, seed=1, dtype=of_weight), 1e-3
    found = outcome(rms_norm.rms_norm, *inputs)
    assert [found[f"gradient {place}"].dtype for place in (0, 1)] == [dtype, of_weight]
    assert_near(found, outcome(plain_rms_norm.rms_norm, *wide(*inputs)), dtype, of_weight)


@pytest.mark.full
@given(
    shape=st.lists(st.integers(1, 5), max_size=2),
    features=FEATURES,
    of_gate=st.sampled_from(DTYPES),
    of_up=st.sampled_from(DTYPES),
    halves=st.booleans(),
)
@settings(max_examples=25)
def test_silu_mul_agrees_with_float64(
    shape: list[int], features: int, of_gate: torch.dtype, of_up: torch.dtype, halves: bool
) -> None:
    gate, up = normal(*shape, features, dtype=of_gate), normal(*shape, features, seed=1, dtype=of_up)
    if halves and of_gate == of_up:  # of one projection
        gate, up = torch.cat([gate, up], dim=-1).chunk(2, dim=-1)
    found = outcome(silu_mul.silu_mul, gate, up)
    assert found["out 0"].dtype == torch.promote_types(of_gate, of_up)
    assert [found[f"gradient {place}"].dtype for place in (0, 1)] == [of_gate, of_up]
    assert_near(found, outcome(plain_silu_mul.silu_mul, *wide(gate, up)), of_gate, of_up)


@pytest.mark.full
@given(
    size=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 40)),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    transposed=st.booleans(),
)
@settings(max_examples=20)
def test_rope_agrees_with_float64(
    size: tuple[int, int, int, int, int], dtypes: tuple[torch.dtype, torch.dtype], transposed: bool
) -> None:
    samples, positions, query_heads, key_heads, half = size
    query = normal(samples, positions, query_heads, 2 * half, dtype=dtypes[0])
    key = normal(samples, positions, key_heads, 2 * half, seed=1, dtype=dtypes[1])
    if transposed:  # in memory, as attention has them
        query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    angles = cos_sin(1, positions, half)
    found = outcome(lambda q, k: rope.rope(q, k, *angles), query, key)
    exact = outcome(lambda q, k: plain_rope.rope(q, k, *wide(*angles)), *wide(query, key))
    assert [found[f"out {place}"].dtype for place in (0, 1)] == list(dtypes)
    assert_near(found, exact, *dtypes)


@pytest.mark.full
@given(
    size=st.tuples(st.integers(1, 2), st.integers(1, 3), st.integers(1, 5), st.integers(1, 3), st.integers(1, 40)),
    dtypes=st.tuples(*(st.sampled_from(DTYPES) for _ in range(4))),
    transposed=st.booleans(),
)
@settings(max_examples=20)
def test_normed_rope_agrees_with_float64(
    size: tuple[int, int, int, int, int], dtypes: tuple[torch.dtype, ...], transposed: bool
) -> None:
    samples, positions, query_heads, key_heads, half = size
    query = normal(samples, positions, query_heads, 2 * half, dtype=dtypes[0])
    key = normal(samples, positions, key_heads, 2 * half, seed=1, dtype=dtypes[1])
    weights = normal(2 * half, seed=2, dtype=dtypes[2]), normal(2 * half, seed=3, dtype=dtypes[3])
    if transposed:  # in memory, as attention has them
        query, key = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key))
    angles = cos_sin(1, positions, half)
    inputs = query, key, *weights
    found = outcome(lambda *leaves: normed_rope.normed_rope(*leaves, *angles, 1e-6), *inputs)
    exact = outcome(lambda *leaves: plain_normed_rope.normed_rope(*leaves, *wide(*angles), 1e-6), *wide(*inputs))
    assert [found[f"out {place}"].dtype for place in (0, 1)] == list(dtypes[:2])
    assert [found[f"gradient {place}"].dtype for place in range(4)] == list(dtypes)
    assert_near(found, exact, *dtypes)


@pytest.mark.full
@pytest.mark.parametrize("heads", [(5, 1), (1, 5), (4, 2), (5, 3)])
@pytest.mark.parametrize("positions", [96, 23], ids=["whole tiles", "the last is not full"])
def test_more_tokens_and_heads_than_a_program_takes_are_taken_by_several(
    monkeypatch: pytest.MonkeyPatch, heads: tuple[int, int], positions: int
) -> None:
    monkeypatch.setattr(normed_rope, "_HEADS", 3)
    monkeypatch.setattr(normed_rope, "_PAIRS_EACH", 1)  # tiles of 32 tokens
    query, key = normal(2, positions, heads[0], 8), normal(2, positions, heads[1], 8, seed=1)
    inputs = query, key, normal(8, seed=2), normal(8, seed=3)
    angles = cos_sin(1, positions, 4)
    found = outcome(lambda *leaves: normed_rope.normed_rope(*leaves, *angles, 1e-6), *inputs)
    exact = outcome(lambda *leaves: plain_normed_rope.normed_rope(*leaves, *wide(*angles), 1e-6), *wide(*inputs))
    assert_near(found, exact, torch.float32)


@pytest.mark.thorough
def test_squares_of_gradients_are_those_of_float64() -> None:
    gradients = [normal(70_001), normal(300, 400, dtype=torch.bfloat16), normal(9)[1:], normal(5, 4).T]
    found = SumOfSquares()(gradients, torch.device("cpu"))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, sum(g.double().square().sum() for g in gradients), rtol=1e-6, atol=0)
    assert SumOfSquares()([*gradients, torch.tensor([torch.nan])], torch.device("cpu")).isnan()
    with pytest.raises(TypeError, match=r"gradient_power.triton: gradient is torch.float64"):
        SumOfSquares()([normal(3).double()], torch.device("cpu"))


def test_trained_angles_have_gradients() -> None:
    inputs = normal(2, 3, 2, 8), normal(2, 3, 1, 8, seed=1), *cos_sin(1, 3, 4)
    exact = outcome(plain_rope.rope, *inputs)
    assert_close_gradients(outcome(rope.rope, *inputs), exact)
    weights = normal(8, seed=2), normal(8, seed=3)
    for op, plain in (
        (rope.rope, plain_rope.rope),
        (
            lambda query, key, *angles: normed_rope.normed_rope(query, key, *weights, *angles, 1e-6),
            lambda query, key, *angles: plain_normed_rope.normed_rope(query, key, *weights, *angles, 1e-6),
        ),
    ):
        for place in (2, 3):  # only one of the two is trained
            leaves = [x.detach().requires_grad_(index == place) for index, x in enumerate(inputs)]
            (found,), (expected,) = (
                torch.autograd.grad(sum(out.square().sum() for out in each(*leaves)), leaves[place])
                for each in (op, plain)
            )
            torch.testing.assert_close(found, expected)


@pytest.mark.thorough
def test_rope_turns_a_view_of_one_projection_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    both = normal(2, 3, 6 * 8).view(2, 3, 6, 8)
    query, key = both[:, :, :4], both[:, :, 4:]
    expected = plain_rope.rope(query, key, *cos_sin(2, 3, 4))
    monkeypatch.setattr(Tensor, "contiguous", None)
    monkeypatch.setattr(Tensor, "clone", None)
    found = rope.rope(query, key, *cos_sin(2, 3, 4))
    for one, other in zip(found, expected, strict=True):
        assert_close_values(one, other)


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")  # NumPy's
def test_without_an_epsilon_what_fills_up_a_tile_reaches_no_gradient() -> None:
    x, weight = normal(3, 4).requires_grad_(), normal(4, seed=1).requires_grad_()
    rms_norm.rms_norm(x, weight, 0.0).sum().backward()
    assert x.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    heads = outcome(
        lambda *leaves: normed_rope.normed_rope(*leaves, *cos_sin(1, 3, 2), 0.0),
        *(normal(1, 3, 1, 4), normal(1, 3, 1, 4, seed=1), normal(4, seed=2), normal(4, seed=3)),
    )
    assert all(found.isfinite().all() for found in heads.values())


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: rms_norm.rms_norm(normal(2, 4).double(), normal(4), 1e-6), "rms_norm.triton: x is torch.float64"),
        (lambda: silu_mul.silu_mul(normal(4), normal(4).double()), "silu_mul.triton: up is torch.float64"),
        (
            lambda: rope.rope(normal(1, 2, 1, 4), normal(1, 2, 1, 4), *(x.double() for x in cos_sin(1, 2, 2))),
            "kernels: {rope: reference}",
        ),
    ],
)
def test_what_would_lose_bits_is_refused(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        call()


def test_gates_of_another_shape_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"gate \[3, 4\] and up \[4\] must have the same shape"):
        silu_mul.silu_mul(normal(3, 4), normal(4))


@pytest.mark.parametrize(
    ("key", "angles"), [((1, 2, 2, 8), (1, 4, 4)), ((1, 4, 2, 6), (1, 4, 4)), ((1, 4, 2, 8), (1, 4, 1))]
)
def test_keys_and_angles_of_another_shape_are_an_error(key: tuple[int, ...], angles: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"rope.triton: query \[1, 4, 2, 8\], key .* query must be"):
        rope.rope(normal(1, 4, 2, 8), normal(*key), normal(*angles), normal(*angles))


def test_head_norms_of_another_shape_are_an_error() -> None:
    heads, angles = (normal(1, 4, 2, 8), normal(1, 4, 1, 8)), cos_sin(1, 4, 4)
    with pytest.raises(ValueError, match=r"normed_rope.triton: .* query_weight \[4\], .* must have"):
        normed_rope.normed_rope(*heads, normal(4), normal(8), *angles, 1e-6)


def test_weights_of_another_shape_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"rms_norm.triton: x \[3, 64\] and weight \[4\] must have"):
        rms_norm.rms_norm(normal(3, 64), normal(4), 1e-6)


def _samples() -> list[tuple[Any, tuple[Any, ...]]]:
    x, weight = normal(3, 8).requires_grad_(), normal(8, seed=1).requires_grad_()
    query, key = normal(1, 2, 2, 8).requires_grad_(), normal(1, 2, 1, 8, seed=1).requires_grad_()
    return [
        (rms_norm.rms_norm, (x, weight, 1e-6)),
        (rms_norm.rms_norm, (x.detach(), weight, 1e-6)),
        (rms_norm.rms_norm, (x.T.contiguous().T, weight, 1e-6)),
        (rms_norm.rms_norm_backward, (normal(3, 8), x.detach(), weight.detach(), 1e-6, True, False)),
        (silu_mul.silu_mul, (x, normal(3, 8, seed=1).requires_grad_())),
        (silu_mul.silu_mul_backward, (normal(3, 8), x.detach(), normal(3, 8, seed=1))),
        (rope.turn, (query, key, *cos_sin(1, 2, 4), False)),
        (normed_rope.forward, (query, key, weight, normal(8, seed=2).requires_grad_(), *cos_sin(1, 2, 4), 1e-6)),
    ]


@pytest.mark.full
@pytest.mark.parametrize("sample", range(len(_samples())))
@pytest.mark.filterwarnings("ignore")  # of torch's own tools
def test_custom_ops_keep_torchs_rules(sample: int) -> None:
    op, arguments = _samples()[sample]
    torch.library.opcheck(op.differentiable, arguments)


def block(x: Tensor, weight: Tensor, gate: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Head norm, rotation and gate in a row, [B, S, N, D] in and out."""
    normed = rms_norm.rms_norm(x, weight, 1e-6)
    query, key = rope.rope(normed, normed[:, :, :1], cos, sin)
    return silu_mul.silu_mul(query + key, gate * x)


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_a_compiler_keeps_them_in_one_graph() -> None:
    inputs = normal(2, 3, 2, 8), normal(8, seed=1), normal(2, 3, 2, 8, seed=2)
    angles = cos_sin(1, 3, 4)
    plain = outcome(lambda *leaves: block(*leaves, *angles), *inputs)
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    assert_close_gradients(outcome(lambda *leaves: compiled(*leaves, *angles), *inputs), plain)


def test_sines_of_another_shape_than_the_cosines_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"sin \[1, 4, 3\]; query must be"):
        rope.rope(normal(1, 4, 2, 8), normal(1, 4, 2, 8), normal(1, 4, 4), normal(1, 4, 3))


def test_heads_of_an_odd_number_of_pairs_are_turned_within_their_tensor() -> None:
    query, key, angles = normal(1, 2, 3, 6), normal(1, 2, 1, 6, seed=1), cos_sin(1, 2, 3)
    found, exact = rope.rope(query, key, *angles), plain_rope.rope(query, key, *angles)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "size",
    [
        pytest.param((1, 8, 1, 1, 128), id="a full tile", marks=pytest.mark.thorough),
        pytest.param((2, 3, 3, 1, 6), id="masked"),
        pytest.param((1, 2, 5, 3, 4), id="heads left over"),
    ],
)
def test_gradients_of_normed_and_turned_heads_are_those_of_the_reference(size: tuple[int, ...]) -> None:
    samples, positions, query_heads, key_heads, features = size
    query, key = normal(samples, positions, query_heads, features), normal(samples, positions, key_heads, features)
    inputs = query, key, 1 + normal(features, seed=2), 1 + normal(features, seed=3)
    angles = cos_sin(1, positions, features // 2)
    found = outcome(lambda *leaves: normed_rope.normed_rope(*leaves, *angles, 1e-3), *inputs)
    exact = outcome(lambda *leaves: plain_normed_rope.normed_rope(*leaves, *wide(*angles), 1e-3), *wide(*inputs))
    assert_near(found, exact, torch.float32)


def test_cosines_and_sines_may_have_other_strides() -> None:
    query, key, weights = normal(2, 3, 2, 8), normal(2, 3, 1, 8, seed=1), (normal(8, seed=2), normal(8, seed=3))
    cos, sin = cos_sin(2, 3, 4)
    sin = sin.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    assert cos.stride() != sin.stride()
    for found, exact in (
        (rope.rope(query, key, cos, sin), plain_rope.rope(query, key, cos, sin)),
        (
            normed_rope.normed_rope(query, key, *weights, cos, sin, 1e-3),
            plain_normed_rope.normed_rope(query, key, *weights, cos, sin, 1e-3),
        ),
    ):
        for one, other in zip(found, exact, strict=True):
            assert_close_values(one, other)


def test_only_gradients_of_norms_that_are_trained_are_returned() -> None:
    query, key, weights = normal(1, 2, 2, 4), normal(1, 2, 1, 4, seed=1), normal(2, 4, seed=2)
    trained, frozen = weights[0].clone().requires_grad_(), weights[1]
    angles = cos_sin(1, 2, 2)
    sum(out.sum() for out in normed_rope.normed_rope(query, key, trained, frozen, *angles, 1e-3)).backward()
    exact = weights[0].clone().requires_grad_()
    plain_normed_rope.normed_rope(query, key, exact, frozen, *angles, 1e-3)[0].sum().backward()
    torch.testing.assert_close(trained.grad, exact.grad)
    assert query.grad is None
    assert frozen.grad is None

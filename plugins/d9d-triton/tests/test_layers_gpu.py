"""Kernels of layers on a GPU: sizes of models, more elements than 32 bits can count, the same bits, inductor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from d9d_nn.ops import add_rms_norm as plain_add_rms_norm
from d9d_nn.ops import rms_norm as plain_rms_norm
from d9d_nn.ops import rope as plain_rope
from d9d_nn.ops import silu_mul as plain_silu_mul
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from d9d_triton import add_rms_norm, permutation, rms_norm, rope, silu_mul
from torch import Tensor

reference = pytest.importorskip("d9d_moe.dispatch.permutation")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

TOKENS, HIDDEN, HEADS, HEAD_DIM, CHOICES = 1000, 2048, 16, 128, 8
#: More elements than 32 bits can count, and after how many of them their values repeat.
MANY, PERIOD = 2**31 + 2**20, 2**20


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def cos_sin(positions: int) -> tuple[Tensor, Tensor]:
    angle = torch.arange(positions, device="cuda").view(1, -1, 1) * torch.logspace(0, -4, HEAD_DIM // 2, device="cuda")
    return angle.cos(), angle.sin()


def shuffled() -> tuple[Tensor, Tensor]:
    slots = torch.randperm(TOKENS * CHOICES, generator=torch.Generator("cuda").manual_seed(0), device="cuda")
    return slots, torch.empty_like(slots).scatter_(0, slots, torch.arange(len(slots), device="cuda")).view(TOKENS, -1)


def outcome(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Tensor]:
    """Outputs of a function, and the gradients of its inputs."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = function(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    torch.autograd.backward(outs, [normal(*out.shape, seed=9).to(out.dtype) for out in outs])  # rounded for all alike
    grads = {f"gradient {place}": leaf.grad for place, leaf in enumerate(leaves) if leaf.grad is not None}
    return {f"out {place}": out.detach() for place, out in enumerate(outs)} | grads


def _cases() -> dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Tensor, ...]]]:
    slots, places = shuffled()
    angles = cos_sin(TOKENS)
    heads = normal(1, TOKENS, HEADS, HEAD_DIM)
    weights = normal(TOKENS, CHOICES, seed=1, dtype=torch.float32)
    return {
        "norm": (
            lambda x, w: rms_norm.rms_norm(x, w, 1e-6),
            lambda x, w: plain_rms_norm.rms_norm(x, w, 1e-6),
            (normal(TOKENS, HIDDEN), normal(HIDDEN, seed=1, dtype=torch.float32)),
        ),
        "head norm": (
            lambda x, w: rms_norm.rms_norm(x, w, 1e-6),
            lambda x, w: plain_rms_norm.rms_norm(x, w, 1e-6),
            (heads, normal(HEAD_DIM, seed=1)),
        ),
        "norm of a sum": (
            lambda x, added, w: add_rms_norm.add_rms_norm(x, added, w, 1e-6),
            lambda x, added, w: plain_add_rms_norm.add_rms_norm(x, added, w, 1e-6),
            (normal(TOKENS, HIDDEN), normal(TOKENS, HIDDEN, seed=2), normal(HIDDEN, seed=1)),
        ),
        "norm before a branch": (
            lambda x, w: add_rms_norm.add_rms_norm(x, None, w, 1e-6),
            lambda x, w: plain_add_rms_norm.add_rms_norm(x, None, w, 1e-6),
            (normal(TOKENS, HIDDEN), normal(HIDDEN, seed=1, dtype=torch.float32)),
        ),
        "gate": (
            silu_mul.silu_mul,
            plain_silu_mul.silu_mul,
            (normal(TOKENS, 3 * HIDDEN), normal(TOKENS, 3 * HIDDEN, seed=1)),
        ),
        "gate of halves": (
            lambda x: silu_mul.silu_mul(*x.chunk(2, -1)),
            lambda x: plain_silu_mul.silu_mul(*x.chunk(2, -1)),
            (normal(TOKENS, 1536),),
        ),
        "rotation": (
            lambda q, k: rope.rope(q, k, *angles),
            lambda q, k: plain_rope.rope(q, k, *angles),
            (heads, normal(1, TOKENS, 8, HEAD_DIM, seed=1)),
        ),
        "rotation of what attention has": (
            lambda q: rope.rope(q.transpose(1, 2), q[:, :4].transpose(1, 2), *angles),
            lambda q: plain_rope.rope(q.transpose(1, 2), q[:, :4].transpose(1, 2), *angles),
            (normal(1, HEADS, TOKENS, HEAD_DIM),),
        ),
        "copies": (
            lambda x: permutation.permute(x, slots, places),
            lambda x: reference.permute(x, slots, places),
            (normal(TOKENS, HIDDEN),),
        ),
        "sums": (
            lambda x, w: permutation.unpermute(x, slots, places, w),
            lambda x, w: reference.unpermute(x, slots, places, w),
            (normal(TOKENS * CHOICES, HIDDEN), weights),
        ),
        "sums of fewer rows": (
            lambda x, w: permutation.unpermute(x, slots[:3000], places, w, absent=True),
            lambda x, w: reference.unpermute(x, slots[:3000], places, w, absent=True),
            (normal(3000, HIDDEN), weights),
        ),
    }


NAMES = [
    *("norm", "head norm", "norm of a sum", "norm before a branch", "gate", "gate of halves"),
    *("rotation", "rotation of what attention has", "copies", "sums", "sums of fewer rows"),
]


@pytest.mark.parametrize("name", NAMES)
def test_it_agrees_with_the_reference_and_repeats_bit_by_bit(name: str) -> None:
    ours, theirs, inputs = _cases()[name]
    first, second = outcome(ours, *inputs), outcome(ours, *inputs)
    assert all(torch.equal(first[key], second[key]) for key in first)
    exact = outcome(theirs, *(x.double() for x in inputs))
    assert_close_gradients(first, exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_sum_is_rounded_as_torch_does(dtype: torch.dtype) -> None:
    x, added = normal(TOKENS, HIDDEN, dtype=dtype), 9 * normal(TOKENS, HIDDEN, seed=2, dtype=dtype)
    normed, total = add_rms_norm.add_rms_norm(x, added, normal(HIDDEN, seed=1), 1e-6)
    assert torch.equal(total, x + added)
    # Not bit by bit: of float32, the compiler contracts a product and the addition before it, where there is one.
    assert_close_values(normed, rms_norm.rms_norm(total, normal(HIDDEN, seed=1), 1e-6))


@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
@pytest.mark.parametrize("name", NAMES)
def test_inductor_keeps_it_in_one_graph(name: str) -> None:
    ours, _, inputs = _cases()[name]
    compiled = torch.compile(ours, fullgraph=True)
    assert_close_gradients(outcome(compiled, *inputs), outcome(ours, *inputs))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_never_waits() -> None:
    cases = _cases()
    for ours, _, inputs in cases.values():
        outcome(ours, *inputs)  # the first call compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        for ours, _, inputs in cases.values():
            outcome(ours, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def ends(name: str, many: Tensor) -> Tensor:
    """First and last rows of the result [..., D] for more elements than 32 bits can count."""
    rows = many.view(-1, HIDDEN)
    if name == "norm":
        out = rms_norm.rms_norm(rows, normal(HIDDEN, seed=1), 1e-6)
    elif name == "gradients of the norm":
        out, *_ = rms_norm.rms_norm_backward(rows, rows, normal(HIDDEN, seed=1), 1e-6, True, True)
    elif name == "norm of a sum":
        out = torch.stack(add_rms_norm.add_rms_norm(rows, rows, normal(HIDDEN, seed=1), 1e-6), dim=1)
    elif name == "gradients of the norm of a sum":
        out, *_ = rms_norm.rms_norm_backward(rows, rows, normal(HIDDEN, seed=1), 1e-6, True, True, rows)
    elif name == "gate":
        out = silu_mul.silu_mul(many, many).view(-1, HIDDEN)
    elif name == "gradients of the gate":
        out = silu_mul.silu_mul_backward(many, many, many)[0].view(-1, HIDDEN)
    else:
        query = many.view(1, -1, HEADS, HEAD_DIM)
        angles = (x[:, 1:2].expand(1, query.shape[1], -1) for x in cos_sin(2))
        out = rope.rope(query, query[:, :, :1], *angles)[0].view(-1, HIDDEN)
    some = PERIOD // HIDDEN
    return torch.stack([out[:some], out[-some:]])


@pytest.mark.parametrize(
    "name",
    [
        *("norm", "gradients of the norm", "norm of a sum", "gradients of the norm of a sum"),
        *("gate", "gradients of the gate", "rotation"),
    ],
)
def test_offsets_beyond_32_bits_are_right(name: str) -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    first, last = ends(name, normal(PERIOD).repeat(MANY // PERIOD))
    assert torch.equal(first, last)
    torch.cuda.empty_cache()


def test_sums_of_rows_beyond_32_bits_are_right() -> None:
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GiB of free device memory")
    rows = normal(PERIOD).repeat(MANY // PERIOD).view(-1, HIDDEN)
    places = torch.arange(len(rows), device="cuda").view(-1, CHOICES)
    weights = torch.ones(places.shape, device="cuda")
    slots, some = places.flatten(), PERIOD // HIDDEN
    out = permutation.unpermute(rows, slots, places, weights)
    assert torch.equal(out[: some // CHOICES], out[-some // CHOICES :])
    grads, of_weights = permutation.weighted_sum_backward(out, rows, places, weights, False, True, True)
    assert torch.equal(grads[:some], grads[-some:])
    assert torch.equal(of_weights[: some // CHOICES], of_weights[-some // CHOICES :])
    torch.cuda.empty_cache()

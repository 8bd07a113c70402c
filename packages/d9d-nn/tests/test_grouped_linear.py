"""grouped_linear and its backend against a dense einsum, forward and backward, for all ways to spread few rows."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import grouped_linear
from d9d_nn.ops.grouped_linear_torch import build, grouped_mm, supports
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

IN, OUT = 16, 24
FUNCTIONS = {"reference": grouped_linear, "grouped_mm": grouped_mm}
#: dtype -> how near the einsum in that dtype.
DTYPES = [torch.float32, torch.bfloat16]
COUNTS = {
    "some": [3, 0, 5, 2],
    "nothing": [0, 0, 0],
    "all_to_the_last": [0, 0, 7],
    "all_to_the_first": [7, 0, 0],
    "one_row": [0, 1, 0],
    "one_expert": [4],
}
backends = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def signature(
    device: str = "cpu", dtype: str = "float32", in_features: int = IN, out_features: int = OUT
) -> OpSignature:
    facts = {"in_features": in_features, "out_features": out_features, "experts": 4}
    return OpSignature("grouped_linear", device, dtype, facts)


def dense(x: Tensor, bank: Tensor, counts: Tensor) -> Tensor:
    """Every row times every matrix, then the right ones; padding rows select none."""
    expert = torch.arange(len(counts)).repeat_interleave(counts)
    chosen = functional.one_hot(expert, len(counts)).to(x.dtype)
    chosen = functional.pad(chosen, (0, 0, 0, len(x) - len(chosen)))
    return torch.einsum("re,ri,eio->ro", chosen, x, bank)


def outcome(
    function: Callable[..., Tensor], counts: list[int], dtype: torch.dtype, spare: int = 0, **options: bool
) -> dict[str, Tensor]:
    rows = sum(counts) + spare
    x = normal(rows, IN, seed=0, dtype=dtype).requires_grad_()
    bank = normal(len(counts), IN, OUT, seed=1, dtype=dtype).requires_grad_()
    out = function(x, bank, torch.tensor(counts), **options)
    out.backward(normal(rows, OUT, seed=2, dtype=dtype))
    return {"out": out.detach(), "x": x.grad, "bank": bank.grad}


@pytest.mark.smoke
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@backends
def test_each_row_meets_its_expert(function: Callable[..., Tensor], dtype: torch.dtype, counts: list[int]) -> None:
    expected = outcome(dense, counts, dtype)
    for options in ({}, {"spare_rows": False}):
        actual = outcome(function, counts, dtype, **options)
        assert actual["out"].dtype == dtype
        assert_close_values(actual["out"], expected["out"])
        assert_close_gradients(actual, expected)


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=6), spare=st.integers(0, 3))
@settings(max_examples=60)
def test_backends_agree_however_rows_are_spread(counts: list[int], spare: int) -> None:
    expected = outcome(dense, counts, torch.float32, spare)
    for function in FUNCTIONS.values():
        assert_close_gradients(outcome(function, counts, torch.float32, spare), expected)


@backends
def test_what_lies_in_spare_rows_reaches_nothing(function: Callable[..., Tensor]) -> None:
    x = normal(9, IN, seed=0)
    x[5:] = torch.nan
    x.requires_grad_()
    bank = normal(3, IN, OUT, seed=1).requires_grad_()
    out = function(x, bank, torch.tensor([2, 0, 3]))
    grad = normal(9, OUT, seed=2)
    grad[5:] = torch.inf
    out.backward(grad)
    assert not out[5:].any()
    assert not x.grad[5:].any()
    assert bank.grad.isfinite().all()


@backends
def test_an_expert_without_rows_has_a_gradient_of_zeros(function: Callable[..., Tensor]) -> None:
    grads = outcome(function, [4, 0, 1], torch.float32)
    assert not grads["bank"][1].any()
    assert grads["bank"][0].any()
    assert not outcome(function, [0, 0], torch.float32)["bank"].any()


@backends
def test_gradients_may_be_expanded_and_inputs_need_not_be_contiguous(function: Callable[..., Tensor]) -> None:
    x = normal(IN, 5, seed=0).requires_grad_()
    bank = normal(2, OUT, IN, seed=1).requires_grad_()
    function(x.T, bank.mT, torch.tensor([2, 3]), spare_rows=False).sum().backward()
    expert = torch.tensor([0, 0, 1, 1, 1])
    assert_close_values(x.grad, bank.detach().sum(1)[expert].T)
    sums = torch.stack([x.detach()[:, :2].sum(1), x.detach()[:, 2:].sum(1)])
    assert_close_values(bank.grad, sums.unsqueeze(1).expand(2, OUT, IN))


@backends
@pytest.mark.parametrize("trained", ["x", "bank"])
def test_what_is_frozen_has_no_gradient(function: Callable[..., Tensor], trained: str) -> None:
    inputs = {"x": normal(5, IN, seed=0), "bank": normal(2, IN, OUT, seed=1)}
    inputs[trained].requires_grad_()
    function(inputs["x"], inputs["bank"], torch.tensor([2, 3])).sum().backward()
    assert {name for name, tensor in inputs.items() if tensor.grad is not None} == {trained}


@backends
def test_autocast_chooses_the_dtype_of_the_product(function: Callable[..., Tensor]) -> None:
    x, bank = normal(5, IN, seed=0).requires_grad_(), normal(2, IN, OUT, seed=1).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        out = function(x, bank, torch.tensor([2, 3]))
    assert out.dtype == torch.bfloat16
    out.float().square().sum().backward()
    assert x.grad.dtype == bank.grad.dtype == torch.float32


@backends
def test_counts_may_be_int32(function: Callable[..., Tensor]) -> None:
    x, bank = normal(5, IN, seed=0), normal(2, IN, OUT, seed=1)
    counts = torch.tensor([2, 3])
    assert torch.equal(function(x, bank, counts.int()), function(x, bank, counts))


@pytest.mark.parametrize(("counts", "spare_rows"), [([2, 4], True), ([2, 2], False)])
def test_the_reference_refuses_counts_that_do_not_fit(counts: list[int], spare_rows: bool) -> None:
    with pytest.raises(ValueError, match=f"counts add up to {sum(counts)}, but there are 5 rows"):
        grouped_linear(torch.zeros(5, 4), torch.zeros(2, 4, 4), torch.tensor(counts), spare_rows=spare_rows)


@pytest.mark.smoke
def test_grouped_mm_reads_no_counts_on_the_host() -> None:
    x = torch.empty(5, IN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    bank = torch.empty(2, IN, OUT, dtype=torch.bfloat16, device="meta", requires_grad=True)
    out = grouped_mm(x, bank, torch.empty(2, dtype=torch.int64, device="meta"))
    out.sum().backward()
    assert out.shape == (5, OUT)
    assert bank.grad.shape == bank.shape


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_grouped_mm_compiles_whole() -> None:
    compiled = torch.compile(grouped_mm, backend="aot_eager", fullgraph=True)
    expected, actual = (outcome(function, [3, 0, 2], torch.bfloat16, 2) for function in (grouped_mm, compiled))
    assert_close_gradients(actual, expected)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (signature(dtype="float64"), "needs one of float32, bfloat16, float16"),
        (signature(device="mps"), "cpu and cuda"),
        (signature(in_features=18), "in_features is 18, not a multiple of 4 for float32"),
        (signature(dtype="bfloat16", out_features=12), "out_features is 12, not a multiple of 8 for bfloat16"),
        (signature(device="cuda"), "for float32 it would loop"),
    ],
)
def test_grouped_mm_says_why_it_refuses(refused: OpSignature, why: str) -> None:
    decision = supports(refused)
    assert not decision.accept
    assert why in decision.reason


def test_grouped_mm_refuses_gpus_on_which_torch_would_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, accepted in {(8, 0): False, (9, 0): True, (10, 0): True, (12, 0): False}.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        decision = supports(signature("cuda", "bfloat16"))
        assert decision.accept == accepted
        assert accepted or f"this GPU has {capability[0]}.0" in decision.reason


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_grouped_mm_computes_what_it_accepts(dtype: str) -> None:
    assert supports(signature(dtype=dtype)).accept
    counts, real = [3, 0, 2], getattr(torch, dtype)
    assert_close_gradients(outcome(build(signature(dtype=dtype)), counts, real), outcome(dense, counts, real))


@pytest.mark.parametrize("features", [18, 20])
def test_torch_still_needs_the_alignment_that_supports_asks_for(features: int) -> None:
    x, bank = torch.zeros(5, features), torch.zeros(2, features, OUT)
    aligned = supports(signature(in_features=features)).accept
    try:
        grouped_mm(x, bank, torch.tensor([2, 3]))
        runs = True
    except RuntimeError:
        runs = False
    assert runs == aligned

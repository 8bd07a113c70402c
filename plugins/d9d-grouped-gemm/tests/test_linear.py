"""The backend against the op's reference, over a stand-in of the library that is as demanding as the library."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature, OpSlot
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_engine.compose.kernels import bind_kernels
from d9d_grouped_gemm.linear import build, supports
from d9d_nn.ops.grouped_linear import grouped_linear
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

IN, OUT = 16, 24


class Gmm(torch.autograd.Function):
    """What grouped_gemm does, on the CPU: it insists where that does, and leaves rubbish where that may."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool) -> Tensor:
        assert not trans_b
        assert batch_sizes.is_cpu
        assert batch_sizes.dtype == torch.int64
        assert batch_sizes.count_nonzero() != 0, "Input batch_sizes should not be all zeros!"
        assert batch_sizes.sum() == len(a)
        assert a.is_contiguous()
        assert b.is_contiguous()
        assert a.dtype == b.dtype == torch.bfloat16
        ctx.save_for_backward(a, b, batch_sizes)
        parts = zip(a.split(batch_sizes.tolist()), b, strict=True)
        return torch.cat([rows @ matrix for rows, matrix in parts])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        a, b, batch_sizes = ctx.saved_tensors
        sizes = batch_sizes.tolist()
        grads = list(zip(grad.split(sizes), a.split(sizes), b, strict=True))
        idle = torch.full(b.shape[1:], torch.nan, dtype=b.dtype)
        to_bank = [rows.T @ g if len(rows) else idle for g, rows, _ in grads]
        return torch.cat([g @ matrix.T for g, _, matrix in grads]), torch.stack(to_bank), None, None


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    package, ops = ModuleType("grouped_gemm"), ModuleType("grouped_gemm.ops")
    package.__spec__ = ModuleSpec("grouped_gemm", None)
    ops.gmm = lambda a, b, batch_sizes, trans_b=False: Gmm.apply(a, b, batch_sizes, trans_b)  # type: ignore[attr-defined]
    package.ops = ops  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "grouped_gemm", package)
    monkeypatch.setitem(sys.modules, "grouped_gemm.ops", ops)


def signature(**changes: Any) -> OpSignature:
    facts = {"device": "cuda", "dtype": "bfloat16", "in_features": IN, "out_features": OUT} | changes
    return OpSignature("grouped_linear", facts.pop("device"), facts.pop("dtype"), facts | {"experts": 4})


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def outcome(function: Callable[..., Tensor], counts: list[int], spare: int = 0, **options: Any) -> dict[str, Tensor]:
    rows = sum(counts) + spare
    x, bank = normal(rows, IN, seed=0).requires_grad_(), normal(len(counts), IN, OUT, seed=1).requires_grad_()
    out = function(x, bank, torch.tensor(counts), **options)
    out.backward(normal(rows, OUT, seed=2))
    return {"out": out.detach(), "x": x.grad, "bank": bank.grad}


@pytest.mark.thorough
@given(counts=st.lists(st.integers(0, 4), min_size=1, max_size=6), spare=st.integers(0, 3))
@settings(max_examples=60)
def test_it_agrees_with_the_reference_however_rows_are_spread(counts: list[int], spare: int) -> None:
    function = build(signature())
    for options in ({}, {"spare_rows": False}) if not spare else ({},):
        expected, actual = (outcome(f, counts, spare, **options) for f in (grouped_linear, function))
        assert_close_values(actual["out"], expected["out"])
        assert_close_gradients(actual, expected)
        assert not actual["bank"][torch.tensor(counts) == 0].any()


def test_what_lies_in_spare_rows_reaches_nothing() -> None:
    x, bank = normal(9, IN, seed=0), normal(3, IN, OUT, seed=1).requires_grad_()
    x[5:] = torch.nan
    out = build(signature())(x.requires_grad_(), bank, torch.tensor([2, 0, 3]))
    grad = normal(9, OUT, seed=2)
    grad[5:] = torch.inf
    out.backward(grad)
    assert not out[5:].any()
    assert not x.grad[5:].any()
    assert bank.grad.isfinite().all()


def test_inputs_need_not_be_contiguous_or_of_64_bits() -> None:
    x, bank = normal(IN, 5, seed=0), normal(2, OUT, IN, seed=1)
    counts = torch.tensor([2, 3], dtype=torch.int32)
    out = build(signature())(x.T, bank.mT, counts)
    assert_close_values(out, grouped_linear(x.T, bank.mT, counts))


def test_autocast_narrows_both() -> None:
    x, bank, counts = normal(5, IN, seed=0).float(), normal(2, IN, OUT, seed=1).float(), torch.tensor([2, 3])
    with torch.autocast("cpu", torch.bfloat16):
        assert build(signature())(x, bank, counts).dtype == torch.bfloat16


@pytest.mark.parametrize(("counts", "options"), [([3, 3], {}), ([2, 2], {"spare_rows": False})])
def test_counts_that_do_not_fit_the_rows_are_an_error(counts: list[int], options: dict[str, bool]) -> None:
    with pytest.raises(ValueError, match=f"counts add up to {sum(counts)}, but there are 5 rows"):
        build(signature())(normal(5, IN, seed=0), normal(2, IN, OUT, seed=1), torch.tensor(counts), **options)


def test_it_accepts_and_says_what_it_costs_but_never_volunteers() -> None:
    decision = supports(signature())
    assert decision.accept
    assert decision.priority == 0
    assert "the host waits" in decision.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, "needs CUDA, the device is cpu"),
        ({"dtype": "float32"}, "needs bfloat16, the model is float32"),
        ({"out_features": 20}, "multiples of 8: out_features is 20"),
    ],
)
def test_what_the_library_cannot_compute_is_refused(changes: dict[str, Any], why: str) -> None:
    decision = supports(signature(**changes))
    assert not decision.accept
    assert why in decision.reason


class TestGroupedGemm(KernelSuite):
    """Over the stand-in, with tensors on the CPU."""

    target = "grouped_linear.grouped_gemm"
    asked = "cuda"
    dtypes = ("bfloat16",)
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"out_features": 20})


class Products(nn.Module):
    """A module with the op."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = OpSlot("grouped_linear", grouped_linear, in_features=IN, out_features=OUT, experts=4)

    def op_slots(self) -> dict[str, OpSlot]:
        return {"linear": self.linear}


def bound(registry: Any, requested: dict[str, str]) -> str:
    offers = registry("d9d_grouped_gemm.plugin")
    judge = Judge([], offers, Circumstances(device="cuda"))
    (choice,) = bind_kernels(Products().named_modules(), offers, requested, "cuda", "bfloat16", judge.verdicts)
    return choice.backend


def test_a_job_gets_it_by_name_only(registry: Any) -> None:
    assert bound(registry, {}) == "reference"
    assert bound(registry, {"grouped_linear": "grouped_gemm"}) == "grouped_gemm"


def test_without_the_library_it_is_refused(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "grouped_gemm")
    with pytest.raises(BuildError, match="needs import:grouped_gemm: module grouped_gemm is not installed"):
        bound(registry, {"grouped_linear": "grouped_gemm"})


def test_nothing_is_left_for_later() -> None:
    """The library computes both gradients at once, which the op allows."""
    deferral = Deferral()
    with deferral.collect() as left:
        found = outcome(build(signature()), [2, 0, 3, 1], deferral=deferral)
    assert len(left) == 0
    assert_close_gradients(found, outcome(grouped_linear, [2, 0, 3, 1]))


def test_both_sizes_of_a_product_are_multiples_of_8() -> None:
    assert supports(signature(in_features=8, out_features=8)).accept
    refused = supports(signature(in_features=12, out_features=20))
    assert (refused.accept, refused.reason) == (False, "needs features in multiples of 8: in_features is 12")


def test_without_any_row_the_library_is_not_called() -> None:
    for spare in (0, 3):
        found = outcome(build(signature()), [0, 0], spare)
        assert found["out"].shape == (spare, OUT)
        assert not any(tensor.any() for tensor in found.values())

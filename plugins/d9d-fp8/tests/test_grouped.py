"""Products of experts in float8, over the emulation; GPU kernels on request."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSignature, OpSlot
from d9d_fp8.grouped import grouped, supports_emulated, supports_grouped
from d9d_nn.ops.grouped_linear import grouped_linear
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.suites.support.calls import Call
from d9d_testing.suites.support.ops import Op, invoke_plainly
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

IN, OUT = 32, 48
COUNTS = (([3, 0, 5, 2], 0), ([3, 0, 5, 2], 3), ([0, 0, 7], 0), ([4], 0), ([0, 1, 0], 0), ([0, 0], 0))
#: Two operands of 3 bits of mantissa, whose errors add up like random numbers.
ROUNDED = MappingProxyType(
    {dtype: replace(within, rtol=0.1, atol=0.1, angle=5e-3, norm=5e-2) for dtype, within in TOLERANCES.items()}
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def calls() -> Iterator[Call]:
    for counts, spare in COUNTS:
        inputs = {
            "x": normal(sum(counts) + spare, IN, seed=0),
            "bank": normal(len(counts), IN, OUT, seed=1),
            "counts": torch.tensor(counts),
        }
        static = {"in_features": IN, "out_features": OUT, "experts": len(counts)}
        yield Call(f"rows {counts} and {spare} of padding", inputs, static, {"spare_rows": bool(spare)})


class _Suite(KernelSuite):
    plugin = "d9d_fp8.plugin"
    tolerances: ClassVar = ROUNDED
    refused: ClassVar = ({"dtype": "float64"}, {"in_features": 40})

    def op(self) -> Op:
        return Op(lambda static: OpSlot("grouped_linear", grouped_linear, **static), calls, invoke_plainly)


@pytest.mark.full
class TestEmulated(_Suite):
    target = "grouped_linear.fp8_emulated"


@pytest.mark.gpu
class TestOnTheGpu(_Suite):
    target = "grouped_linear.fp8"
    device = "cuda"
    dtypes: ClassVar = ("bfloat16",)
    refused: ClassVar = ({"dtype": "float32"}, {"device": "cpu"}, {"out_features": 40})


def outcome(function: Any, counts: list[int], spare: int = 0) -> dict[str, Tensor]:
    rows = sum(counts) + spare
    x, bank = normal(rows, IN, seed=0), normal(len(counts), IN, OUT, seed=1)
    x[sum(counts) :] = torch.nan  # padding rows
    out = function(x.requires_grad_(), bank.requires_grad_(), torch.tensor(counts), spare_rows=bool(spare))
    grad = normal(rows, OUT, seed=2)
    grad[sum(counts) :] = torch.inf
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad, "bank": bank.grad}


@pytest.mark.thorough
@given(counts=st.lists(st.integers(0, 9), min_size=1, max_size=6), spare=st.integers(0, 3))
@settings(max_examples=40)
def test_it_is_near_the_reference_however_rows_are_spread(counts: list[int], spare: int) -> None:
    expected, found = outcome(grouped_linear, counts, spare), outcome(partial(grouped, emulate=True), counts, spare)
    assert_close_gradients(found, expected, ROUNDED[torch.float32])
    # Their product equals the reference's: in full precision.
    torch.testing.assert_close(found["bank"], expected["bank"])
    for name in ("out", "x"):
        assert not found[name][sum(counts) :].any()


def test_each_row_and_each_column_of_a_matrix_has_a_scale_of_its_own() -> None:
    x, bank, counts = normal(6, IN, seed=0), normal(2, IN, OUT, seed=1), torch.tensor([2, 4])
    rows = torch.exp2(torch.tensor([-6.0, 6.0, 0.0, 12.0, -12.0, 3.0])).view(6, 1)
    columns = torch.exp2((torch.arange(OUT) % 20 - 10).float())
    plain = grouped(x, bank, counts, emulate=True)
    torch.testing.assert_close(grouped(x * rows, bank * columns, counts, emulate=True), plain * rows * columns)


def test_a_deferred_gradient_of_a_bank_is_the_same() -> None:
    at_once, deferral = outcome(partial(grouped, emulate=True), [3, 0, 5]), Deferral()
    x, bank = normal(8, IN, seed=0).requires_grad_(), normal(3, IN, OUT, seed=1).requires_grad_()
    with deferral.collect() as left:
        out = grouped(x, bank, torch.tensor([3, 0, 5]), spare_rows=False, deferral=deferral, emulate=True)
        out.backward(normal(8, OUT, seed=2))
    assert bank.grad is None
    left.run()
    assert torch.equal(bank.grad, at_once["bank"])
    assert torch.equal(x.grad, at_once["x"])


def signature(**changes: Any) -> OpSignature:
    facts = {"device": "cuda", "dtype": "bfloat16", "in_features": IN, "out_features": OUT, "experts": 4} | changes
    return OpSignature("grouped_linear", facts.pop("device"), facts.pop("dtype"), facts)


def test_neither_volunteers() -> None:
    for supports in (supports_grouped, supports_emulated):
        decision = supports(signature())
        assert decision.accept
        assert decision.priority == 0
        assert "used only if the job names it" in decision.reason


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"device": "cpu"}, "need CUDA, the device is cpu; fp8_emulated runs on any device"),
        ({"dtype": "float32"}, "in bfloat16, this one is float32"),
        ({"out_features": 24}, "multiples of 16: out_features is 24"),
    ],
)
def test_what_the_kernel_cannot_compute_is_refused(changes: dict[str, Any], why: str) -> None:
    decision = supports_grouped(signature(**changes))
    assert not decision.accept
    assert why in decision.reason


def test_an_older_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    assert supports_grouped(signature()).reason == "the kernel needs compute capability 9.x or 10.x, this GPU has 8.9"


@pytest.mark.parametrize(
    ("capability", "accepted"), [((8, 9), False), ((9, 0), True), ((10, 3), True), ((11, 0), False)]
)
def test_gpus_with_the_kernel_are_accepted(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], accepted: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert supports_grouped(signature()).accept == accepted
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert supports_grouped(signature()).accept


def test_emulation_runs_on_any_device_in_dtypes_of_torch() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        assert supports_emulated(signature(device="cpu", dtype=dtype)).accept
    refused = supports_emulated(signature(dtype="float64"))
    assert (refused.accept, refused.reason) == (
        False, "needs one of float32, bfloat16, float16, the model is float64",
    )  # fmt: skip
    refused = supports_emulated(signature(in_features=40, out_features=24))
    assert refused.reason == "needs features in multiples of 16: in_features is 40"


def test_a_frozen_bank_costs_no_gradient() -> None:
    x, bank = normal(3, IN, seed=0).requires_grad_(), normal(2, IN, OUT, seed=1)
    grouped(x, bank, torch.tensor([1, 2]), emulate=True).sum().backward()
    assert x.grad.any()
    x, bank = x.detach(), bank.requires_grad_()
    grouped(x, bank, torch.tensor([1, 2]), emulate=True).sum().backward()
    assert bank.grad.any()
    assert x.grad is None

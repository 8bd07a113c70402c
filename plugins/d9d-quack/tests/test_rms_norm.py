"""The backend against the op's reference, over a stand-in of the library that is as demanding as the library."""

from __future__ import annotations

import inspect
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature, OpSlot
from d9d_core.registry.capabilities import Circumstances, Judge
from d9d_engine.compose.kernels import bind_kernels
from d9d_quack import rules
from d9d_quack.rms_norm import build
from d9d_testing.suites.kernel import KernelSuite
from torch import Tensor, nn

reference = pytest.importorskip("d9d_nn.ops.rms_norm").rms_norm
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def rmsnorm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Stand-in for the library, on the CPU; it insists where that does."""
    assert weight is not None
    assert x.dtype in FLOATS
    assert weight.dtype in FLOATS
    assert weight.is_contiguous()
    assert weight.shape == x.shape[-1:]
    assert x.numel()
    assert x.shape[-1] * x.element_size() % 4 == 0
    return reference(x, weight, eps)


@pytest.fixture
def library(install: Any) -> None:
    install("quack.rmsnorm", rmsnorm)


@pytest.mark.thorough
@pytest.mark.usefixtures("library")
class TestQuack(KernelSuite):
    """Over the stand-in, with tensors on the CPU."""

    target = "rms_norm.quack"
    asked = "cuda"
    refused = ({"dtype": "float64"}, {"device": "cpu"})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # many, of the library and of its dependencies
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("quack") is None, reason="needs a CUDA device and QuACK")
class TestQuackOnCuda(KernelSuite):
    """The library itself, which compiles a kernel for each number of features and dtype."""

    target = "rms_norm.quack"
    device = "cuda"
    dtypes = ("float32", "bfloat16")


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("rows", [3, 0])
def test_rows_are_normalised_with_any_epsilon_and_weight(rows: int) -> None:
    x, weight = torch.randn(rows, 2, 8).bfloat16(), torch.linspace(-1, 2, 16)[::2]
    norm = build(signature())
    for eps in (1e-6, 0.5):
        found = norm(x, weight, eps)
        assert (found.shape, found.dtype) == (x.shape, torch.bfloat16)
        assert torch.equal(found, reference(x, weight, eps))


def signature(**changes: Any) -> OpSignature:
    return OpSignature("rms_norm", "cuda", "bfloat16", {"features": 64} | changes)


def test_it_accepts_but_never_volunteers() -> None:
    decision = rules.rms_norm(signature())
    assert decision.accept
    assert decision.priority == 0
    assert "used only if the job names it" in decision.reason


@pytest.mark.parametrize(("major", "accepted"), [(8, False), (9, True), (10, True), (12, False), (None, True)])
def test_it_is_for_hopper_and_blackwell(monkeypatch: pytest.MonkeyPatch, major: int | None, accepted: bool) -> None:
    monkeypatch.setattr(rules, "capability", lambda: major)
    decision = rules.rms_norm(signature())
    assert decision.accept == accepted
    assert accepted or decision.reason == f"QuACK needs compute capability 9.x or 10.x, this GPU has {major}.x"


@pytest.mark.parametrize(("dtype", "accepted"), [("bfloat16", False), ("float16", False), ("float32", True)])
def test_rows_that_end_between_four_bytes_are_refused(dtype: str, accepted: bool) -> None:
    decision = rules.rms_norm(OpSignature("rms_norm", "cuda", dtype, {"features": 33}))
    assert decision.accept == accepted
    assert accepted or decision.reason == "QuACK copies at least 4 bytes at a time: features 33 is odd"


class Norm(nn.Module):
    """A module with the op."""

    def op_slots(self) -> dict[str, OpSlot]:
        return {"norm": OpSlot("rms_norm", reference, features=8)}


def bound(registry: Any, requested: dict[str, str]) -> str:
    offers = registry("d9d_quack.plugin")
    judge = Judge([], offers, Circumstances(device="cuda"))
    (choice,) = bind_kernels([("", Norm())], offers, requested, "cuda", "bfloat16", judge.verdicts)
    return choice.backend


@pytest.mark.usefixtures("library")
def test_a_job_gets_it_by_name_only(registry: Any) -> None:
    assert bound(registry, {}) == "reference"
    assert bound(registry, {"rms_norm": "quack"}) == "quack"


def test_without_the_library_it_is_refused(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "quack", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None)
    with pytest.raises(BuildError, match="needs import:quack: .*'pip install d9d-quack' installs it"):
        bound(registry, {"rms_norm": "quack"})


@pytest.mark.full
def test_the_stand_in_takes_what_the_library_takes() -> None:
    """The library imports on a CPU, and computes nothing there."""
    theirs = inspect.signature(pytest.importorskip("quack.rmsnorm").rmsnorm).parameters
    ours = inspect.signature(rmsnorm).parameters
    assert {name: ours[name].default for name in ours} == {name: theirs[name].default for name in ours}

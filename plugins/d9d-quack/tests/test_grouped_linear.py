"""Products of experts against the op's reference, over a stand-in that is as demanding as the library."""

from __future__ import annotations

import inspect
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import grouped_linear as reference
from d9d_quack import rules
from d9d_quack.grouped_linear import build, grouped_linear
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import assert_close_gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

IN, OUT = 16, 24
FLOATS = (torch.bfloat16, torch.float16)


def gemm(
    A: Tensor,
    B: Tensor,
    *,
    cu_seqlens_m: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    dynamic_scheduler: bool = False,
    tuned: bool,
) -> Tensor:
    """Stand-in: elements that the library does not write are NaN."""
    starts = cu_seqlens_k if cu_seqlens_m is None else cu_seqlens_m
    assert starts is not None
    assert (starts.dtype, tuned) == (torch.int32, False)
    assert A.dtype == B.dtype
    assert A.dtype in FLOATS
    bounds = list(zip(starts.tolist(), starts.tolist()[1:], strict=False))
    if cu_seqlens_m is None:
        assert A.mT.is_contiguous()
        assert B.is_contiguous()
        return torch.stack([A[:, first:last] @ B[first:last] for first, last in bounds])
    assert A.is_contiguous()
    assert B.is_contiguous() or B.mT.is_contiguous()
    out = A.new_full((len(A), B.shape[2]), torch.nan)
    for (first, last), matrix in zip(bounds, B, strict=True):
        out[first:last] = A[first:last] @ matrix
    return out


@pytest.fixture
def library(install: Any) -> None:
    install("quack.gemm_interface", gemm)


@pytest.mark.thorough
@pytest.mark.usefixtures("library")
class TestGroupedLinear(KernelSuite):
    """Over the stand-in, with tensors on the CPU."""

    target = "grouped_linear.quack"
    asked = "cuda"
    dtypes = ("bfloat16",)
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"out_features": 20})


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # many, of the library and of its dependencies
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("quack") is None, reason="needs a CUDA device and QuACK")
class TestGroupedLinearOnCuda(KernelSuite):
    """The library itself."""

    target = "grouped_linear.quack"
    device = "cuda"
    dtypes = ("bfloat16",)


def normal(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, torch.bfloat16)


def outcome(
    function: Any, counts: list[int], spare: int, device: str = "cpu", sizes: tuple[int, int] = (IN, OUT)
) -> Any:
    """Result and gradients; what lies in spare rows, and arrives there as a gradient, is no number."""
    rows = sum(counts)
    x, grad = (normal(rows + spare, size, seed=size, device=device) for size in sizes)
    x[rows:], grad[rows:] = torch.nan, torch.inf
    x, bank = x.requires_grad_(), normal(len(counts), *sizes, seed=1, device=device).requires_grad_()
    out = function(x, bank, torch.tensor(counts, device=device), spare_rows=spare > 0)
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad, "bank": bank.grad}


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("spare", [0, 3])
def test_what_lies_in_spare_rows_reaches_nothing(spare: int) -> None:
    assert_close_gradients(outcome(grouped_linear, [2, 0, 3], spare), outcome(reference, [2, 0, 3], spare))


@pytest.mark.usefixtures("library")
def test_weight_gradients_may_be_left_for_later() -> None:
    x, counts, grads = normal(5, IN, seed=0).requires_grad_(), torch.tensor([2, 0, 3]), []
    for deferral in (None, Deferral()):
        bank = normal(3, IN, OUT, seed=1).requires_grad_()
        if deferral is None:
            grouped_linear(x, bank, counts, deferral=deferral).sum().backward()
        else:
            with deferral.collect() as left:
                grouped_linear(x, bank, counts, deferral=deferral).sum().backward()
            assert bank.grad is None
            left.run()
        grads.append(bank.grad)
    assert torch.equal(*grads)


@pytest.mark.thorough
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("spare_rows", [False, True])
def test_compiled_code_keeps_the_op(spare_rows: bool) -> None:
    compiled = torch.compile(grouped_linear, backend="aot_eager", fullgraph=True)
    results = []
    for function in (grouped_linear, compiled):
        x, bank = normal(5, IN, seed=0).requires_grad_(), normal(3, IN, OUT, seed=1).requires_grad_()
        out = function(x, bank, torch.tensor([2, 0, 3]), spare_rows=spare_rows)
        out.float().square().sum().backward()
        results.append({"out": out.detach(), "x": x.grad, "bank": bank.grad})
    assert_close_gradients(*results)


@pytest.mark.usefixtures("library")
def test_products_can_be_kept_by_checkpointing(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that the documentation of checkpointing gives."""
    calls: list[set[str]] = []
    library = sys.modules["quack.gemm_interface"]
    monkeypatch.setattr(library, "gemm", lambda A, B, **given: (calls.append(set(given)), gemm(A, B, **given))[1])
    for operators, forwards in (([torch.ops.d9d_quack.grouped_linear.default], 1), ([], 2)):
        calls.clear()
        x, bank = normal(5, IN, seed=0).requires_grad_(), normal(3, IN, OUT, seed=1).requires_grad_()
        contexts = partial(create_selective_checkpoint_contexts, operators)
        checkpoint(
            grouped_linear, x, bank, torch.tensor([2, 0, 3]), use_reentrant=False, context_fn=contexts
        ).sum().backward()
        # The forwards, and the gradients of rows and bank.
        assert sum("cu_seqlens_m" in given for given in calls) == forwards + 1
        assert sum("cu_seqlens_k" in given for given in calls) == 1


def signature(**changes: Any) -> OpSignature:
    values = {"device": "cuda", "dtype": "bfloat16", "static": {"in_features": 64, "out_features": 48, "experts": 3}}
    return OpSignature("grouped_linear", **values | changes)


@pytest.mark.parametrize(
    ("major", "chosen", "reason"),
    [(9, True, ""), (None, True, ""), (10, False, "used only if the job names it"), (8, None, "this GPU has 8.x")],
)
def test_it_is_chosen_where_it_was_measured(
    monkeypatch: pytest.MonkeyPatch, major: int | None, chosen: bool | None, reason: str
) -> None:
    monkeypatch.setattr(rules, "capability", lambda: major)
    decision = rules.grouped_linear(signature())
    assert (decision.accept, decision.priority > 10) == (chosen is not None, bool(chosen))
    assert reason in decision.reason


def test_rows_that_tensor_copies_cannot_read_are_refused() -> None:
    static = {"in_features": 64, "out_features": 20, "experts": 3}
    assert "out_features 20 is no multiple of 8" in rules.grouped_linear(signature(static=static)).reason


@pytest.mark.usefixtures("library")
def test_another_release_of_the_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["quack.gemm_interface"], "gemm", lambda A, B, *, tuned: A @ B)
    with pytest.raises(
        BuildError, match="does not take cu_seqlens_m, cu_seqlens_k, dynamic_scheduler; install a release"
    ):
        build(signature())


@pytest.mark.full
def test_the_stand_in_takes_what_the_library_takes() -> None:
    """The library imports on a CPU, and computes nothing there."""
    library = pytest.importorskip("quack.gemm_interface")
    theirs = inspect.signature(library.gemm).parameters
    assert [name for name in inspect.signature(gemm).parameters if name not in theirs] == []


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning")
@pytest.mark.skipif(not torch.cuda.is_available() or find_spec("quack") is None, reason="needs a CUDA device and QuACK")
class TestOnCuda:
    """Calls of the library that the suite does not make."""

    @pytest.mark.parametrize("spare", [0, 5])
    @pytest.mark.parametrize("counts", [[130, 0, 7, 63], [0, 0, 0, 1], [0, 700, 0, 3]], ids=str)
    def test_tiles_of_several_experts_and_rows_of_nobody(self, counts: list[int], spare: int) -> None:
        function = build(signature())
        for sizes in ((64, 96), (264, 520)):
            expected, found = (outcome(each, counts, spare, "cuda", sizes) for each in (reference, function))
            assert_close_gradients(found, expected)

    def test_the_host_never_waits(self) -> None:
        function = build(signature())
        x, bank = normal(200, IN, seed=0, device="cuda"), normal(4, IN, OUT, seed=1, device="cuda")
        x, bank, counts = x.requires_grad_(), bank.requires_grad_(), torch.tensor([130, 0, 7, 63], device="cuda")
        function(x, bank, counts).sum().backward()  # compiles
        torch.cuda.set_sync_debug_mode("error")
        try:
            for spare_rows in (True, False):
                function(x, bank, counts, spare_rows=spare_rows).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_the_same_rows_give_the_same_bits(self) -> None:
        """Tiles go to programs in another order in each run."""
        function = build(signature())
        counts = torch.multinomial(torch.ones(16), 20_000, replacement=True).bincount(minlength=16).tolist()
        first, second = (outcome(function, counts, 0, "cuda", (512, 384)) for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)

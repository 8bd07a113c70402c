"""grouped_mm on CUDA: equal to the reference, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_nn.ops.grouped_linear import grouped_linear
from d9d_nn.ops.grouped_linear_torch import grouped_mm, supports
from d9d_testing.tolerances import assert_close_gradients
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

IN, OUT = 64, 96


@pytest.fixture(autouse=True)
def the_kernel_runs_here() -> None:
    facts = {"in_features": IN, "out_features": OUT, "experts": 4}
    decision = supports(OpSignature("grouped_linear", "cuda", "bfloat16", facts))
    if not decision.accept:
        pytest.skip(decision.reason)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.bfloat16)


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("counts", [[130, 0, 7, 63], [0, 0, 0, 0], [0, 200, 0, 0], [0, 0, 0, 1]], ids=str)
def test_grouped_mm_agrees_with_the_reference(counts: list[int], spare: int) -> None:
    outcomes = []
    for function in (grouped_mm, grouped_linear):
        x = normal(sum(counts) + spare, IN, seed=0).requires_grad_()
        bank = normal(4, IN, OUT, seed=1).requires_grad_()
        out = function(x, bank, torch.tensor(counts, device="cuda"))
        out.backward(normal(*out.shape, seed=2))
        outcomes.append({"out": out.detach(), "x": x.grad, "bank": bank.grad})
    assert_close_gradients(*outcomes)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_the_host_never_waits() -> None:
    x, bank = normal(200, IN, seed=0).requires_grad_(), normal(4, IN, OUT, seed=1).requires_grad_()
    counts = torch.tensor([130, 0, 7, 63], device="cuda")
    grouped_mm(x, bank, counts).sum().backward()  # the first call may set up the library
    torch.cuda.set_sync_debug_mode("error")
    try:
        for spare_rows in (True, False):
            grouped_mm(x, bank, counts, spare_rows=spare_rows).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")

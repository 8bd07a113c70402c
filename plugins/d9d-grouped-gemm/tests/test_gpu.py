"""The library itself on a GPU, against the op's reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_grouped_gemm.linear import build, supports
from d9d_nn.ops.grouped_linear import grouped_linear
from d9d_testing.suites.kernel import KernelSuite
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from torch import Tensor

pytest.importorskip("grouped_gemm", reason="needs grouped_gemm")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

IN, OUT = 256, 192


def outcome(function: Any, counts: list[int], spare: int) -> dict[str, Tensor]:
    """Output and gradients of a weighted sum; rows are sorted by expert, the spare ones last."""
    generator = torch.Generator("cuda").manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    rows = sum(counts) + spare
    x, bank, grad = normal(rows, IN), normal(len(counts), IN, OUT), normal(rows, OUT)
    out = function(x.requires_grad_(), bank.requires_grad_(), torch.tensor(counts, device="cuda"))
    out.backward(grad)
    return {"out": out.detach(), "x": x.grad, "bank": bank.grad}


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("counts", [[64, 128, 64], [1, 0, 300, 7], [0, 0, 0], [0, 33, 0]], ids=str)
def test_values_and_gradients(counts: list[int], spare: int) -> None:
    signature = OpSignature("grouped_linear", "cuda", "bfloat16", {"in_features": IN, "out_features": OUT})
    assert supports(signature).accept
    expected, actual = (outcome(function, counts, spare) for function in (grouped_linear, build(signature)))
    assert_close_values(actual["out"], expected["out"])
    assert_close_gradients(actual, expected)
    assert not actual["bank"][torch.tensor(counts) == 0].any()


class TestSuite(KernelSuite):
    """Further calls, such as tensors that are not contiguous."""

    target = "grouped_linear.grouped_gemm"
    device = "cuda"
    dtypes = ("bfloat16",)

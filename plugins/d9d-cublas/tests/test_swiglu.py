"""The feed-forward layer against the op's reference, over a stand-in that is as demanding as the library."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.kernel import OpSignature
from d9d_cublas import rules, swiglu
from d9d_testing.suites.kernel import KernelSuite
from torch import Tensor

SwiGLU = pytest.importorskip("d9d_nn.swiglu").SwiGLU


@pytest.mark.full
@pytest.mark.usefixtures("ops")
class TestSwiglu(KernelSuite):
    """Over the stand-in, with tensors on the CPU."""

    target = "swiglu.cublas"
    asked = "cuda"
    dtypes = ("bfloat16", "float16")
    refused = ({"dtype": "float32"}, {"device": "cpu"}, {"hidden": 20})


def layer(**changes: Any) -> Any:
    """A layer of H 16 and I 24, with the backend unless ``plain``."""
    torch.manual_seed(0)
    module = SwiGLU(16, 24, std=0.3, output_std=0.3).to(torch.bfloat16)
    if not changes.get("plain"):
        module.swiglu.bind("cublas", swiglu.build(OpSignature("swiglu", "cuda", "bfloat16")))
    return module


def step(module: Any, x: Tensor, input_gradient: bool = True) -> list[Tensor | None]:
    """Result of a layer, and the gradients of its input and weights."""
    x = x.detach().requires_grad_(input_gradient)
    out = module(x)
    if out.requires_grad:
        out.backward(torch.ones_like(out).cumsum(0) / 8)
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


def alike(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert [each is None for each in found] == [each is None for each in expected]
    for one, other in zip(found, expected, strict=True):
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert (one.float() - other.float()).norm() <= 2e-2 * other.float().norm()


@pytest.mark.thorough
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_computes_the_same_by_algorithms_of_the_library(ops: Any, compiled: bool) -> None:
    module, x = layer(), torch.randn(2, 5, 16).bfloat16()
    if compiled:
        module.compile(backend="aot_eager", fullgraph=True)
    alike(step(module, x), step(layer(plain=True), x))
    ops.ran.clear()
    step(module, x)
    assert sorted((problem.layout, problem.out_features, problem.in_features) for problem, _ in ops.ran) == [
        *[("forward", 16, 24), ("forward", 24, 16), ("forward", 24, 16)],
        *[("rows_gradient", 16, 24), ("rows_gradient", 48, 16)],
        *[("weight_gradient", 16, 24), ("weight_gradient", 48, 16)],
    ]


@pytest.mark.parametrize(
    ("changes", "accepted", "reason"),
    [
        ({}, True, "0.568 instead of 0.611 ms"),
        ({"checkpointed": True}, True, "used only if the job names it"),
        ({"static": {"hidden": 64, "features": 100}}, False, "features 100 is no multiple of 8"),
        ({"dtype": "float32"}, False, "multiplies bfloat16 or float16; the tensors are float32"),
        ({"device": "cpu"}, False, "cuBLASLt needs CUDA, the device is cpu"),
    ],
)
def test_layers_on_cuda_get_it_by_themselves(changes: Any, accepted: bool, reason: str) -> None:
    values = {"device": "cuda", "dtype": "bfloat16", "static": {"hidden": 64, "features": 128}} | changes
    decision = rules.swiglu(OpSignature("swiglu", **values))
    assert (decision.accept, decision.priority) == (accepted, 25 if accepted and not changes else 0)
    assert reason in decision.reason


def test_sizes_that_are_no_multiple_of_16_bytes_are_named() -> None:
    def asked(dtype: str = "bfloat16", **sizes: int) -> tuple[bool, int, str]:
        decision = rules.swiglu(OpSignature("swiglu", "cuda", dtype, sizes))
        return decision.accept, decision.priority, decision.reason

    assert asked("float16", hidden=8, features=16) == (True, 25, rules.REASON)
    why = "its algorithms need rows of 16 bytes or multiples: hidden 9, features 7 is no multiple of 8"
    assert asked(hidden=9, features=7) == (False, 0, why)

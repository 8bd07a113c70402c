"""Feed-forward layers with the kernel of the whole layer, compared with layers of three products and a gate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_nn.swiglu import SwiGLU
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from d9d_triton.joint import swiglu
from torch import Tensor

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Recorded(swiglu.TorchProducts):
    """Products that keep the shapes of their operands."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def rows_gradient(self, grad: Tensor, weight: Tensor) -> Tensor:
        self.calls.append(("rows", tuple(grad.shape), tuple(weight.shape)))
        return super().rows_gradient(grad, weight)

    def joint_rows_gradient(self, grad: Tensor, weights: list[Tensor]) -> Tensor:
        self.calls.append(("rows", tuple(grad.shape), tuple(torch.cat(weights).shape)))
        return super().joint_rows_gradient(grad, weights)

    def weight_gradient(self, grad: Tensor, rows: Tensor) -> Tensor:
        self.calls.append(("weight", tuple(grad.shape), tuple(rows.shape)))
        return super().weight_gradient(grad, rows)


RECORDED = Recorded()
#: A custom op can be registered once.
RECORDING = swiglu.register("d9d_triton_tests::swiglu", RECORDED)


def layer(*frozen: str, kernel: Any = None) -> Any:
    torch.manual_seed(0)
    module = SwiGLU(16, 24, std=0.3, output_std=0.3)
    for name in frozen:
        module.get_submodule(name).requires_grad_(False)
    if kernel is not None:
        module.swiglu.bind("triton", kernel)
    return module


def step(module: Any, x: Tensor, trained: bool = True) -> dict[str, Tensor]:
    """Output of a layer, and the gradients of its input and of its weights."""
    x = x.detach().requires_grad_(trained)
    out = module(x)
    if out.requires_grad:
        (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    grads = {name: parameter.grad for name, parameter in (*module.named_parameters(), ("x", x))}
    return {"out": out.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.thorough
@pytest.mark.parametrize("frozen", [(), ("gate_proj",), ("up_proj", "down_proj"), PROJECTIONS])
@pytest.mark.parametrize("trained", [True, False], ids=["with the gradient of x", "without"])
def test_a_layer_computes_the_same_and_only_the_gradients_that_are_needed(
    frozen: tuple[str, ...], trained: bool
) -> None:
    x = rows(2, 5, 16)
    assert_close_gradients(step(layer(*frozen, kernel=swiglu.swiglu), x, trained), step(layer(*frozen), x, trained))


@pytest.mark.parametrize(
    ("frozen", "trained", "expected"),
    [
        ((), True, [("rows", (10, 48), (48, 16)), ("weight", (10, 48), (10, 16))]),
        ((), False, [("weight", (10, 48), (10, 16))]),
        (("gate_proj",), True, [("rows", (10, 48), (48, 16)), ("weight", (10, 24), (10, 16))]),
        (("gate_proj", "up_proj"), True, [("rows", (10, 48), (48, 16))]),
    ],
)
def test_gate_and_up_share_the_products_of_their_gradients(
    frozen: tuple[str, ...], trained: bool, expected: list[Any]
) -> None:
    RECORDED.calls.clear()
    step(layer(*frozen, kernel=RECORDING), rows(2, 5, 16), trained)
    of_down = [("rows", (10, 16), (16, 24)), ("weight", (10, 16), (10, 24))]
    assert RECORDED.calls == of_down + expected


def test_weights_stay_wide_under_autocast() -> None:
    x = rows(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = step(layer(kernel=swiglu.swiglu), x), step(layer(), x)
    assert {name: grad.dtype for name, grad in found.items()} == {name: grad.dtype for name, grad in expected.items()}
    assert_close_gradients(found, expected, TOLERANCES[torch.bfloat16])


@pytest.mark.thorough
def test_a_compiled_layer_keeps_the_op() -> None:
    x, compiled = rows(2, 5, 16), layer(kernel=swiglu.swiglu)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_close_gradients(step(compiled, x), step(layer(), x))


def test_nothing_of_the_gate_is_kept_but_its_arguments() -> None:
    kept: list[tuple[int, ...]] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(kernel=swiglu.swiglu)(rows(10, 16).requires_grad_())
    assert sorted(kept) == [(10, 16), (10, 24), (10, 24), (16, 24), (24, 16), (24, 16)]


def test_weight_gradients_that_are_left_for_later_are_products_of_their_own() -> None:
    module, deferral = layer(kernel=lambda *_: pytest.fail("has no weight gradients to leave")), Deferral()
    for name in PROJECTIONS:
        module.get_submodule(name).defer_to(deferral)
    module(rows(3, 16).requires_grad_())


def test_dtypes_that_differ_are_refused() -> None:
    weights = [layer().get_submodule(name).weight for name in PROJECTIONS]
    with pytest.raises(TypeError, match="must be of one dtype, not torch.bfloat16, torch.float32"):
        swiglu.swiglu(rows(3, 16).bfloat16(), *weights)


def test_ops_keep_the_rules_of_custom_ops() -> None:
    tensors = [rows(*shape).requires_grad_() for shape in ((5, 16), (24, 16), (24, 16), (16, 24))]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.d9d_triton.swiglu_with_gradients.default, tuple(tensors), test_utils=tests)
    inside = tuple(rows(5, 24) for _ in range(3))
    torch.library.opcheck(torch.ops.d9d_triton.silu_mul_backward_beside.default, inside, test_utils=tests)

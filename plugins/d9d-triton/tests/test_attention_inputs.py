"""Attention layers with the kernel of their inputs, compared with layers of three projections, norms and rotations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.ops import normed_rope as plain
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from d9d_triton.joint.attention_inputs import attention_inputs
from torch import Tensor

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
ROTATION = RotaryEmbedding(8, theta=1e4)(torch.arange(5).unsqueeze(0))


def layer(*frozen: str, joint: bool = False) -> Any:
    torch.manual_seed(0)
    module = GroupedQueryAttention(
        16, query_heads=4, key_value_heads=2, head_dim=8, std=0.3, output_std=0.3, head_norm_eps=1e-6
    )
    for name in frozen:
        module.get_submodule(name).requires_grad_(False)
    if joint:
        module.attention_inputs.bind("triton", attention_inputs)
    return module


def step(module: Any, x: Tensor, trained: bool = True) -> dict[str, Tensor]:
    """Output of a layer, and the gradients of its input and of its parameters."""
    x = x.detach().requires_grad_(trained)
    out = module(x, ROTATION, None)
    (out.float() * torch.arange(out.numel()).view(out.shape).cos()).sum().backward()
    grads = {name: parameter.grad for name, parameter in (*module.named_parameters(), ("x", x))}
    return {"out": out.detach()} | {name: grad for name, grad in grads.items() if grad is not None}


@pytest.mark.thorough
@pytest.mark.parametrize(
    "frozen", [(), ("k_proj",), ("q_proj", "v_proj", "k_norm"), PROJECTIONS, (*PROJECTIONS, "q_norm", "k_norm")]
)
@pytest.mark.parametrize("trained", [True, False], ids=["with the gradient of x", "without"])
def test_a_layer_computes_the_same_and_only_the_gradients_that_are_needed(
    frozen: tuple[str, ...], trained: bool
) -> None:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    assert_close_gradients(step(layer(*frozen, joint=True), x, trained), step(layer(*frozen), x, trained))


def test_gradients_of_all_projections_are_one_product_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    multiply = Tensor.mm

    def mm(a: Tensor, b: Tensor) -> Tensor:
        shapes.append((*a.shape, b.shape[1]))
        return multiply(a, b)

    monkeypatch.setattr(Tensor, "mm", mm)
    step(layer(joint=True), torch.randn(2, 5, 16))
    assert shapes == [(10, 64, 16), (64, 10, 16)]


def test_weights_stay_wide_under_autocast() -> None:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = step(layer(joint=True), x), step(layer(), x)
    assert {name: grad.dtype for name, grad in found.items()} == {name: grad.dtype for name, grad in expected.items()}
    assert_close_gradients(found, expected, TOLERANCES[torch.bfloat16])


@pytest.mark.thorough
def test_a_compiled_layer_keeps_the_op() -> None:
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
    compiled = layer(joint=True)
    compiled.compile(backend="aot_eager", fullgraph=True)
    assert_close_gradients(step(compiled, x), step(layer(), x))


def test_weight_gradients_that_are_left_for_later_are_products_of_their_own() -> None:
    module, deferral = layer(), Deferral()
    module.attention_inputs.bind("triton", lambda *_: pytest.fail("has no weight gradients to leave"))
    for name in PROJECTIONS:
        module.get_submodule(name).defer_to(deferral)
    module(torch.randn(2, 5, 16).requires_grad_(), ROTATION, None)


def test_a_layer_with_a_changed_projection_has_no_slot_for_all_of_them() -> None:
    class Other(type(layer().k_proj)):
        """Product of a third party."""

    module = layer()
    assert "attention_inputs" in module.op_slots()
    module.k_proj.__class__ = Other
    assert set(module.op_slots()) == {"rope", "normed_rope"}


@pytest.mark.parametrize("trained", [(True, True), (True, False), (False, True)])
def test_trained_angles_have_gradients(trained: tuple[bool, bool]) -> None:
    x, (cos, sin) = torch.randn(1, 5, 16), (torch.randn(1, 5, 4).requires_grad_(wanted) for wanted in trained)
    module = layer()
    weights = [module.get_submodule(name).weight for name in (*PROJECTIONS, "q_norm", "k_norm")]
    sum(out.sum() for out in attention_inputs(x, *weights, cos, sin, 1e-6)).backward()
    found = {name: angles.grad for name, angles in (("cos", cos), ("sin", sin)) if angles.grad is not None}
    cos, sin = (angles.detach().requires_grad_() for angles in (cos, sin))
    heads = [torch.nn.functional.linear(x, weight).view(1, 5, -1, 8) for weight in weights[:2]]
    sum(out.sum() for out in plain.normed_rope(*heads, *weights[3:], cos, sin, 1e-6)).backward()
    exact = {"cos": cos.grad, "sin": sin.grad}
    assert list(found) == [name for name, wanted in zip(exact, trained, strict=True) if wanted]
    assert_close_gradients(found, {name: exact[name] for name in found})


def test_projections_of_other_dtypes_are_refused() -> None:
    module = layer()
    weights = [module.get_submodule(name).weight for name in (*PROJECTIONS, "q_norm", "k_norm")]
    with pytest.raises(TypeError, match=r"must be of one dtype, not torch.bfloat16, torch.float32"):
        attention_inputs(torch.randn(1, 5, 16).bfloat16(), *weights, ROTATION.cos, ROTATION.sin, 1e-6)

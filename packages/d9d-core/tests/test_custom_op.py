"""Custom operators with little host time: results, gradients, graphs, checkpoints, and what they refuse."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from d9d_core.custom_op import CustomOp
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

ran: list[str] = []


@CustomOp.define("d9d_testing::scaled_sine")
def scaled_sine(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Sine of x times weight, and its cosine."""
    ran.append("forward")
    return (x * factor).sin() * weight, (x * factor).cos()


@CustomOp.define("d9d_testing::scaled_sine_backward")
def scaled_sine_backward(grad: Tensor, weight: Tensor, cosine: Tensor, factor: float) -> Tensor:
    """Gradient of x."""
    return grad * weight * cosine * factor


@scaled_sine.register_fake
def _fake(x: Tensor, _weight: Tensor, _factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


@scaled_sine_backward.register_fake
def _fake_backward(grad: Tensor, _weight: Tensor, _cosine: Tensor, _factor: float) -> Tensor:
    return torch.empty_like(grad)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, ctx.factor = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _grad_cosine: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, cosine = ctx.saved_tensors
    of_x, of_weight, _ = ctx.needs_input_grad
    grad_x = scaled_sine_backward(grad, weight, cosine, ctx.factor) if of_x else None
    return grad_x, grad * (x * ctx.factor).sin() if of_weight else None, None


scaled_sine.register_autograd(_backward, setup_context=_keep)


def tensors(*needed: bool) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    x, weight = (torch.randn(3, 4, generator=generator).requires_grad_(need) for need in needed)
    return x, weight


def grads(function: Any, x: Tensor, weight: Tensor) -> list[Tensor | None]:
    out = function(x, weight)
    out.square().sum().backward()
    return [out.detach(), x.grad, weight.grad]


def expected(x: Tensor, weight: Tensor) -> Tensor:
    return (x * 2.0).sin() * weight + 1


def block(x: Tensor, weight: Tensor) -> Tensor:
    return scaled_sine(x, weight, 2.0)[0] + 1


@pytest.mark.smoke
@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)])
def test_gradients_are_computed_eagerly_and_compiled(needed: tuple[bool, bool]) -> None:
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    right = grads(expected, *tensors(*needed))
    for function in (block, compiled):
        found = grads(function, *tensors(*needed))
        assert [one is None for one in found] == [one is None for one in right]
        pairs = [(one, other) for one, other in zip(found, right, strict=True) if other is not None]
        for one, other in pairs:
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("compiled", [True, False])
def test_arguments_may_be_named(compiled: bool) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return scaled_sine(x, factor=2.0, weight=weight)[0] + 1

    call = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    for one, other in zip(grads(call, *tensors(True, True)), grads(expected, *tensors(True, True)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("named", [{"factr": 2.0}, {"factor": 2.0, "weight": None}, {}])
def test_wrong_names_of_arguments_are_errors_of_torch(named: dict[str, Any]) -> None:
    x, weight = tensors(True, True)
    with pytest.raises(RuntimeError, match=r"scaled_sine"):
        scaled_sine(x, weight, **named)


@pytest.mark.smoke
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_calls_without_gradients_leave_no_graph(mode: Any) -> None:
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    x, weight = tensors(True, True)
    with mode():
        for function in (block, compiled):
            out = function(x, weight)
            assert not out.requires_grad
            torch.testing.assert_close(out, expected(x, weight).detach())


@pytest.mark.smoke
@pytest.mark.parametrize("trained", [True, False])
def test_a_compiled_graph_contains_the_operator_without_autograd(trained: bool) -> None:
    graphs: list[list[Any]] = []

    def compiler(graph: Any, _inputs: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return make_boxed(graph)

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func as make_boxed

    compiled = torch.compile(block, backend=aot_autograd(fw_compiler=compiler, bw_compiler=compiler), fullgraph=True)
    out = compiled(*tensors(trained, trained))
    assert scaled_sine.overload in graphs[0]
    if trained:
        out.sum().backward()
        assert scaled_sine_backward.overload in graphs[1]
    assert not [target for graph in graphs for target in graph if "with_gradients" in str(target)]


@pytest.mark.smoke
@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("compiled", [True, False])
def test_selective_checkpointing_keeps_outputs_by_the_operators_name(kept: bool, compiled: bool) -> None:
    contexts = partial(create_selective_checkpoint_contexts, [scaled_sine.overload] if kept else [])

    def checkpointed(x: Tensor, weight: Tensor) -> Tensor:
        out: Tensor = checkpoint(block, x, weight, use_reentrant=False, context_fn=contexts)
        return out

    function = torch.compile(checkpointed, backend="aot_eager", fullgraph=True) if compiled else checkpointed
    grads(function, *tensors(True, True))  # the first call also traces
    ran.clear()
    found, right = grads(function, *tensors(True, True)), grads(expected, *tensors(True, True))
    assert len(ran) == (1 if kept else 2)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.smoke
def test_operators_keep_torchs_rules() -> None:
    x, weight = tensors(False, False)
    torch.library.opcheck(scaled_sine.overload, (x, weight, 2.0))
    # test_aot_dispatch_dynamic reads .grad of a tensor that is no leaf, which warns, and warnings are errors here.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(scaled_sine.differentiable, (*tensors(True, True), 2.0), test_utils=checks)
    torch.library.opcheck(scaled_sine_backward.overload, (x, weight, x, 2.0))


def test_a_second_derivative_is_refused() -> None:
    x, weight = tensors(True, True)
    (grad,) = torch.autograd.grad(block(x, weight).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"scaled_sine_backward.default has no gradient formula"):
        grad.sum().backward()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_backward_without_a_formula_is_an_error(compiled: bool) -> None:
    def function(x: Tensor, weight: Tensor) -> Tensor:
        return scaled_sine_backward(x, weight, x, 2.0) + 1

    x, weight = tensors(True, False)
    call = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    assert not call(x.detach(), weight).requires_grad
    with pytest.raises(Exception, match=r"scaled_sine_backward.default has no gradient formula"):
        call(x, weight).sum().backward()


def test_gradients_of_lists_and_defaults_are_refused() -> None:
    @CustomOp.define("d9d_testing::of_list")
    def of_list(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts)

    @CustomOp.define("d9d_testing::of_default")
    def of_default(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    x = torch.ones(2)
    assert of_list([x, x]).shape == (4,)
    assert of_default(x).tolist() == [2.0, 2.0]
    assert of_default(x, factor=3.0).tolist() == [3.0, 3.0]
    for op, name in ((of_list, r"Tensor\[\] parts"), (of_default, r"float factor=2.*")):
        with pytest.raises(TypeError, match=f"argument '{name}' is a list of tensors or has a default"):
            op.register_autograd(lambda _ctx, _grad: None)


def test_a_name_is_registered_once() -> None:
    def again(x: Tensor) -> Tensor:
        return x.clone()

    with pytest.raises(RuntimeError, match="scaled_sine"):
        CustomOp("d9d_testing::scaled_sine", again)


def test_an_operator_shows_its_functions_docstring() -> None:
    assert scaled_sine_backward.__doc__ == "Gradient of x."


def test_a_copied_module_keeps_its_operator() -> None:
    module = torch.nn.Module()
    module.kernel = scaled_sine  # type: ignore[assignment]
    assert copy.deepcopy(module).kernel is scaled_sine

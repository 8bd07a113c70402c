"""Layers of one input, whose products add up its gradient, compute what separate layers do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from d9d_core.extend import Deferral, OpSignature
from d9d_nn.attention.grouped_query import GroupedQueryAttention
from d9d_nn.linear import Linear
from d9d_nn.ops.shared_input_linear import (
    accumulated,
    accumulated_build,
    accumulated_supports,
    shared_input_linear,
    sum_of_products,
)
from d9d_nn.rope.rotary_embedding import RotaryEmbedding
from d9d_nn.swiglu import SwiGLU
from d9d_testing.tolerances import TOLERANCES, assert_close_gradients
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

pytestmark = pytest.mark.smoke
OUTPUTS = (24, 8, 8)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def accumulated_signature(device: str = "cuda", dtype: str = "bfloat16") -> OpSignature:
    return OpSignature("shared_input_linear", device, dtype, {"in_features": 16, "out_features": OUTPUTS})


# --- the op


def results(
    function: Callable[..., tuple[Tensor, ...]],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    *,
    bias: bool = True,
    frozen: tuple[str, ...] = (),
) -> dict[str, Tensor | None]:
    """Outputs, and gradients of all that is not frozen, by name."""
    leaves = {"x": normal(*shape, 16)}
    leaves |= {f"weight {at}": normal(out, 16, seed=1 + at) for at, out in enumerate(OUTPUTS)}
    leaves |= {f"bias {at}": normal(out, seed=5 + at) for at, out in enumerate(OUTPUTS) if bias}
    leaves = {name: leaf.to(dtype).requires_grad_(name not in frozen) for name, leaf in leaves.items()}
    weights = [leaves[f"weight {at}"] for at in range(len(OUTPUTS))]
    outs = function(leaves["x"], weights, [leaves.get(f"bias {at}") for at in range(len(OUTPUTS))])
    seeds = [normal(*out.shape, seed=9 + at).to(dtype) for at, out in enumerate(outs)]
    trained = [(out, seed) for out, seed in zip(outs, seeds, strict=True) if out.requires_grad]
    torch.autograd.backward(*map(list, zip(*trained, strict=True)))
    found: dict[str, Tensor | None] = {f"out {at}": out.detach() for at, out in enumerate(outs)}
    return found | {name: leaf.grad for name, leaf in leaves.items()}


FROZEN = ((), ("x",), ("weight 0", "weight 2"), ("x", "weight 1", "bias 0"), ("weight 0", "weight 1", "weight 2"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(), (5,), (2, 7), (0, 7)])
def test_all_but_the_gradient_of_the_input_are_the_same_bit_for_bit(
    dtype: torch.dtype, bias: bool, shape: tuple[int, ...]
) -> None:
    for frozen in FROZEN:
        found, expected = (
            results(function, dtype, shape, bias=bias, frozen=frozen) for function in (accumulated, shared_input_linear)
        )
        of_x, of_x_apart = found.pop("x"), expected.pop("x")
        for name, one in expected.items():
            other = found[name]
            assert (one is None) == (other is None), f"{name}, frozen {frozen}"
            if one is not None and other is not None:
                assert one.dtype == other.dtype
                assert torch.equal(one, other), f"{name}, frozen {frozen}"
        assert (of_x is None) == (of_x_apart is None) == ("x" in frozen)
        if of_x is not None and of_x_apart is not None:
            assert of_x.dtype == dtype
            assert of_x.shape == of_x_apart.shape
            if of_x.numel():
                assert_close_gradients({"x": of_x}, {"x": of_x_apart})


def test_the_sum_is_rounded_once_for_each_product() -> None:
    rows, weights = [normal(64, out).bfloat16() for out in OUTPUTS], [normal(out, 16).bfloat16() for out in OUTPUTS]
    found = sum_of_products(rows, weights)
    total = rows[0].double() @ weights[0].double()
    for more, weight in zip(rows[1:], weights[1:], strict=True):
        total = total.bfloat16().double() + more.double() @ weight.double()
    assert found.dtype == torch.bfloat16
    # Rounding up or down may be a matter of the order of float32 sums.
    assert (found == total.bfloat16()).float().mean() > 0.98


def test_an_output_that_nobody_uses_changes_no_other_gradient() -> None:
    def used(function: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        x, *weights = (normal(rows, 16, seed=at).requires_grad_() for at, rows in enumerate((3, *OUTPUTS)))
        first, _, _ = function(x, weights, [None, None, None])
        first.square().sum().backward()
        assert weights[1].grad is None or not weights[1].grad.any()
        assert x.grad is not None
        assert weights[0].grad is not None
        return x.grad, weights[0].grad

    torch.testing.assert_close(used(accumulated), used(shared_input_linear))


def test_a_backward_inside_of_autocast_keeps_the_dtype_of_the_forward() -> None:
    x, *weights = (normal(rows, 16, seed=at).requires_grad_() for at, rows in enumerate((3, *OUTPUTS)))
    total = sum(out.square().sum() for out in accumulated(x, weights, [None] * 3))
    assert isinstance(total, Tensor)
    with torch.autocast("cpu", torch.bfloat16):
        (gradient,) = torch.autograd.grad(total, x)
    wide = x.detach().double()
    exact = sum(2 * (wide @ weight.double().T) @ weight.double() for weight in weights)
    assert gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), exact, rtol=1e-5, atol=1e-4)


def test_each_weight_has_a_bias_or_none() -> None:
    with pytest.raises(ValueError, match="3 weights and 2 biases; give None for none"):
        accumulated(normal(2, 16), [normal(out, 16) for out in OUTPUTS], [None, None])


def test_the_gradient_of_the_input_is_added_up_by_name_only_until_it_is_measured() -> None:
    for device in ("cuda", "cpu"):
        decision = accumulated_supports(accumulated_signature(device))
        assert (decision.accept, decision.priority) == (True, 0)
        assert "by name only" in decision.reason
    refused = accumulated_supports(accumulated_signature(dtype="int8"))
    assert not refused.accept
    assert "the tensors are int8" in refused.reason


# --- layers


def attention(*, bias: bool = False) -> GroupedQueryAttention:
    torch.manual_seed(0)
    layer = GroupedQueryAttention(
        32, query_heads=4, key_value_heads=2, head_dim=8, std=0.3, output_std=0.3, head_norm_eps=1e-6, bias=bias
    )
    for name, parameter in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return layer


def feed_forward() -> SwiGLU:
    torch.manual_seed(0)
    return SwiGLU(32, 48, std=0.3, output_std=0.3)


LAYERS = {"attention": attention, "attention with biases": partial(attention, bias=True), "feed-forward": feed_forward}
layers = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


def bound(layer: Any, function: Callable[..., Any] | None = None) -> Any:
    layer.shared_input_linear.bind("accumulated", function or accumulated_build(accumulated_signature()))
    return layer


def call(layer: nn.Module, hidden: Tensor) -> Tensor:
    rotation = RotaryEmbedding(8, theta=1e4)(torch.arange(hidden.shape[1]).unsqueeze(0))
    out: Tensor = layer(hidden, rotation, None) if isinstance(layer, GroupedQueryAttention) else layer(hidden)
    return out


def step(layer: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = call) -> dict[str, Tensor]:
    """Output, and gradients of the input and all parameters."""
    layer.zero_grad()
    hidden = normal(2, 5, 32, seed=3).to(next(layer.parameters()).dtype).requires_grad_()
    out = run(layer, hidden)
    out.float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert hidden.grad is not None
    assert None not in gradients.values()
    return {"out": out.detach(), "hidden": hidden.grad, **gradients}


@layers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_compute_what_they_do_with_separate_products(make: Any, dtype: torch.dtype) -> None:
    found, expected = step(bound(make().to(dtype))), step(make().to(dtype))
    of_hidden = {"hidden": found.pop("hidden")}, {"hidden": expected.pop("hidden")}
    for name, one in expected.items():
        assert torch.equal(found[name], one), name
    assert_close_gradients(*of_hidden)


@layers
def test_weights_stay_wide_under_autocast(make: Any) -> None:
    def run(layer: nn.Module, hidden: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return call(layer, hidden)

    found, expected = step(bound(make()), run), step(make(), run)
    assert {name: one.dtype for name, one in found.items()} == {name: one.dtype for name, one in expected.items()}
    # Products in bfloat16 that autograd adds in float32 are added in bfloat16.
    of_hidden = {"hidden": found.pop("hidden")}, {"hidden": expected.pop("hidden")}
    assert_close_gradients(*of_hidden, TOLERANCES[torch.bfloat16])
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


def selective() -> Any:
    keeps = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
    return create_selective_checkpoint_contexts(
        lambda _, op, *args, **kwargs: CheckpointPolicy.MUST_SAVE if op in keeps else CheckpointPolicy.PREFER_RECOMPUTE
    )


@layers
@pytest.mark.parametrize("options", [{}, {"context_fn": selective}], ids=["whole", "selective"])
def test_checkpointed_layers_compute_the_same(make: Any, options: dict[str, Any]) -> None:
    def run(layer: nn.Module, hidden: Tensor) -> Tensor:
        out: Tensor = checkpoint(call, layer, hidden, use_reentrant=False, **options)
        return out

    found, expected = step(bound(make()), run), step(bound(make()))
    for name, one in expected.items():
        assert torch.equal(found[name], one), name


@layers
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own, in 2.11
def test_compiled_layers_add_gradients_of_the_input_in_products_alone(make: Any) -> None:
    def run(layer: nn.Module) -> tuple[dict[str, Tensor], list[str]]:
        """Results, and names of the operations of the backward whose results are as wide as the input."""
        torch.compiler.reset()
        names: list[str] = []

        def keep(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
            return make_boxed_func(graph)

        def read(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
            names.extend(str(node.target) for node in nodes if tuple(node.meta["val"].shape)[-1:] == (32,))
            return keep(graph, inputs)

        backend = aot_autograd(fw_compiler=keep, bw_compiler=read)
        return step(layer, torch.compile(call, backend=backend, fullgraph=True)), names

    found, names = run(bound(make()))
    expected, apart = run(make())
    assert_close_gradients(found, expected)
    assert apart.count("aten.add.Tensor") == len(make().shared_input_linear.static["out_features"]) - 1
    assert names.count("aten.add.Tensor") == 0
    assert names.count("d9d_nn.sum_of_products.default") == 1
    # What inductor has written for products, an op behind them reads; for one before them it writes it a second time.
    assert "aten.mm.default" not in names[names.index("d9d_nn.sum_of_products.default") :]


# --- who goes first


@layers
def test_a_slot_without_a_backend_calls_the_layers(make: Any) -> None:
    called: list[str] = []
    layer = make()
    names = [name for name, module in layer.named_children() if isinstance(module, Linear)]
    for name in names:
        layer.get_submodule(name).multiply = lambda rows, _, name=name: (
            called.append(name) or Linear.multiply(layer.get_submodule(name), rows, None)
        )
    step(layer)
    assert called == names


@layers
@pytest.mark.parametrize("kind", ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook"])
def test_layers_with_hooks_are_called(make: Any, kind: str) -> None:
    layer = bound(make(), lambda *_: pytest.fail("calls no layer"))
    first = next(module for module in layer.children() if isinstance(module, Linear))
    calls: list[str] = []
    getattr(first, f"register_{kind}")(lambda *_: calls.append(kind))
    step(layer)
    assert calls == [kind]


@layers
def test_weight_gradients_that_are_left_for_later_are_products_of_their_own(make: Any) -> None:
    layer, deferral = bound(make(), lambda *_: pytest.fail("has no weight gradients to leave")), Deferral()
    for module in layer.children():
        if isinstance(module, Linear):
            module.defer_to(deferral)
    call(layer, normal(2, 5, 32))
    deferral.wanted = False
    with pytest.raises(pytest.fail.Exception, match="no weight gradients"):
        call(layer, normal(2, 5, 32))


@layers
def test_a_layer_with_a_changed_projection_has_no_slot_for_its_products(make: Any) -> None:
    class Other(Linear):
        """Somebody's own product."""

    def slots(name: str, change: Callable[[Any], Any]) -> bool:
        layer = make()
        change(layer.get_submodule(name))
        return "shared_input_linear" in layer.op_slots()

    def replace_forward(module: Any) -> None:
        module.forward = lambda rows: rows

    def replace_class(module: Any) -> None:
        module.__class__ = Other

    def lend(module: Any) -> None:
        module.lend_product(lambda _: None)

    names = [name for name, module in make().named_children() if isinstance(module, Linear)]
    for change in (replace_forward, replace_class, lend):
        # The last one reads something else.
        assert [slots(name, change) for name in names] == [False] * (len(names) - 1) + [True]
    assert slots(names[0], lambda _: None)


def test_a_kernel_of_the_whole_feed_forward_layer_goes_first() -> None:
    layer = bound(feed_forward(), lambda *_: pytest.fail("the whole layer has a kernel"))
    layer.swiglu.bind("whole", lambda x, *_: x + 1)
    assert torch.equal(layer(torch.zeros(1, 1, 32)), torch.ones(1, 1, 32))
    assert "shared_input_linear" in layer.swiglu.parts

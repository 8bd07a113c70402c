"""Gradients that are left for later arrive as if they had come at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from d9d_core.deferral import Deferral, DeferredWeights, _by_parameter
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

pytestmark = pytest.mark.smoke


class Times(torch.autograd.Function):
    """``x * weight``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, deferral: Deferral, edge: GradientEdge, _: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.deferral, ctx.edge = deferral, edge
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        x, weight = ctx.saved_tensors
        x = x.detach()
        ctx.deferral.add(ctx.edge, lambda: x * grad)
        return grad * weight, None, None, None, None


def times(x: Tensor, weight: Tensor, deferral: Deferral | None) -> Tensor:
    if deferral is None:
        return x * weight
    backward_comes = torch.zeros(0, requires_grad=True)
    out: Tensor = Times.apply(x, weight.detach(), deferral, get_gradient_edge(weight), backward_comes)
    return out


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_ways(function: Callable[..., Tensor], **options: Any) -> list[tuple[Tensor, int]]:
    """The gradient of a weight and how often autograd added to it: without a deferral, with one at once, and late."""
    found = []
    for way in ("autograd", "at once", "late"):
        weight = nn.Parameter(drawn(4, 3).to(options.get("dtype")))
        deferral = None if way == "autograd" else Deferral()
        if wide := options.get("grad_dtype"):
            weight.grad_dtype = wide
        added: list[Tensor] = []
        weight.register_post_accumulate_grad_hook(added.append)
        loss = function(weight, deferral)
        if way == "late":
            assert deferral is not None
            with deferral.collect() as left:
                loss.backward()
            assert weight.grad is None
            assert len(left) > 0
            left.run()
            assert len(left) == 0
        else:
            loss.backward()
        assert weight.grad is not None
        found.append((weight.grad, len(added)))
    return found


def cast(weight: Tensor, deferral: Deferral | None) -> Tensor:
    return times(drawn(4, 3).bfloat16(), weight.bfloat16(), deferral).float().sum()


def nested(weight: Tensor, deferral: Deferral | None) -> Tensor:
    return times(times(drawn(4, 3), weight, deferral), weight, deferral).sum()


def casts_of_one(weight: Tensor, deferral: Deferral | None) -> Tensor:
    return times(times(drawn(4, 3).bfloat16(), weight.bfloat16(), deferral), weight.bfloat16(), deferral).float().sum()


def parts_of_what_saves_tensors(weight: Tensor, deferral: Deferral | None) -> Tensor:
    top, bottom = weight.exp().split(2)
    return (times(drawn(2, 3), top, deferral) + times(drawn(2, 3, seed=1), bottom, deferral)).sum()


def through_a_python_function(weight: Tensor, deferral: Deferral | None) -> Tensor:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad * 2

    return times(drawn(4, 3), Double.apply(weight), deferral).sum()


@pytest.mark.parametrize(
    "function", [cast, nested, casts_of_one, parts_of_what_saves_tensors, through_a_python_function]
)
def test_what_lies_between_the_op_and_the_parameter_counts(function: Callable[..., Tensor]) -> None:
    (plain, _), (at_once, _), (late, added) = all_ways(function)
    torch.testing.assert_close(at_once, plain)
    torch.testing.assert_close(late, plain)
    assert late.dtype == plain.dtype
    assert added == 1


def test_late_gradients_add_up_in_the_format_of_the_gradient() -> None:
    (plain, _), *others = all_ways(
        lambda weight, deferral: times(drawn(4, 3).bfloat16(), weight, deferral).float().sum(),
        dtype=torch.bfloat16,
        grad_dtype=torch.float32,
    )
    for gradient, _ in others:
        assert gradient.dtype == torch.float32
        assert torch.equal(gradient, plain)


def test_backwards_leave_apart_and_run_in_any_order() -> None:
    weight, deferral = nn.Parameter(drawn(4, 3)), Deferral()
    left = []
    for seed in (1, 2):
        loss = times(drawn(4, 3, seed=seed), weight, deferral).sum()
        with deferral.collect() as one:
            loss.backward()
        left.append(one)
    left[1].run()
    assert weight.grad is not None
    assert torch.equal(weight.grad, drawn(4, 3, seed=2))
    left[0].run()
    torch.testing.assert_close(weight.grad, drawn(4, 3, seed=1) + drawn(4, 3, seed=2))


def test_a_repeated_backward_leaves_nothing_twice() -> None:
    weight, deferral = nn.Parameter(drawn(4, 3)), Deferral()
    loss = times(drawn(4, 3), weight, deferral).sum()
    with deferral.collect() as left:
        loss.backward(retain_graph=True)
    with deferral.ignore():
        loss.backward()
    left.run()
    assert weight.grad is not None
    assert torch.equal(weight.grad, drawn(4, 3))


def test_the_graph_does_not_wait_for_the_weights() -> None:
    weights, deferral = [nn.Parameter(drawn(4, 3, seed=index)) for index in range(3)], Deferral()
    x = drawn(4, 3).requires_grad_()
    alive: list[Callable[[], Tensor | None]] = []
    for weight in weights:
        x = times(x, weight, deferral)
        alive.append(weakref.ref(x))
    loss = x.sum()
    del x
    with deferral.collect() as left:
        loss.backward()
    del loss
    gc.collect()
    # The graph is gone, with the tensors that had one; what waits shares their memory.
    assert [one() is not None for one in alive] == [False] * 3
    left.run()
    assert all(weight.grad is not None for weight in weights)


def test_gradients_are_added_before_many_bytes_of_them_exist() -> None:
    order: list[str] = []
    left = DeferredWeights()
    weights = [nn.Parameter(torch.zeros(numel)) for numel in (8, 5 * 2**20, 5 * 2**20, 8)]  # 20 MiB each in the middle
    for name, weight in zip("abcd", weights, strict=True):
        weight.register_post_accumulate_grad_hook(lambda _weight, name=name: order.append(f"added {name}"))
        left.add(get_gradient_edge(weight), partial(computed, weight, name, order))
    left.run()
    assert order[:3] == ["computed a", "computed b", "computed c"]
    assert sorted(order[3:6]) == ["added a", "added b", "added c"]
    assert order[6:] == ["computed d", "added d"]


def computed(weight: Tensor, name: str, order: list[str]) -> Tensor:
    order.append(f"computed {name}")
    return torch.ones_like(weight)


def test_deferred_gradients_of_a_common_parameter_are_one_group() -> None:
    """However far the parameter is from them, and whichever came in between."""
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    outputs = [(a * 2).sin(), b * 3, (c + 1).cos() * 2, (b * a).exp(), c, b * 7, a * 5]
    items: list[Any] = [(get_gradient_edge(tensor), number) for number, tensor in enumerate(outputs)]
    assert [[number for _, number in group] for group in _by_parameter(items)] == [[2, 4], [0, 1, 3, 5, 6]]


def test_gradients_are_ignored_inside_the_block_only() -> None:
    deferral, weight = Deferral(), nn.Parameter(torch.tensor([2.0]))
    edge = get_gradient_edge(weight)
    with deferral.ignore():
        deferral.add(edge, lambda: torch.tensor([5.0]))
    assert weight.grad is None
    deferral.add(edge, lambda: torch.tensor([3.0]))
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0]

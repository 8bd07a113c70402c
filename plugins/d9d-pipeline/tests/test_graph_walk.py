"""Division of autograd graphs into nodes for input gradients and late sides."""

from __future__ import annotations

from typing import Any

import torch
from d9d_pipeline.runtime.graph_walk import _Sides, _successors_first, divide_graph
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge


def test_each_node_comes_once_and_after_its_successors() -> None:
    x = torch.ones(2, requires_grad=True)
    sine = x.sin()
    first, second = sine.exp(), sine + x
    starts = [out.grad_fn for out in (first, second, first, sine)]
    found = [node.name() for node in _successors_first(starts)]  # type: ignore[arg-type, union-attr]
    assert found == ["torch::autograd::AccumulateGrad", "SinBackward0", "ExpBackward0", "AddBackward0"]


def test_sides_that_share_a_node_are_merged_with_what_they_have() -> None:
    leaves: Any = {name: name.upper() for name in "abcd"}
    sides: Any = _Sides(leaves)
    first = sides.side_with({"x", "a"})
    first.roots.append(0)
    first.branching.append("n")
    second, third = sides.side_with({"b"}), sides.side_with({"c"})
    second.roots.append(1)
    second.branching.append("m")
    merged = sides.side_with({"x", "b", "d"})
    assert list(sides.sides.values()) == [third, merged]
    assert (merged.roots, merged.branching, merged.parameters) == ([0, 1], ["n", "m"], ["A", "B", "D"])
    again = sides.side_with({"a"})
    assert list(sides.sides.values()) == [third, again]
    assert (again.roots, again.branching, again.parameters) == ([0, 1], ["n", "m"], ["A", "B", "D"])
    assert third.parameters == ["C"]


def divided(roots: list[Tensor], *late: Tensor) -> Any:
    return divide_graph([get_gradient_edge(root) for root in roots], lambda leaf: any(leaf is one for one in late))


def test_an_output_of_late_weights_alone_begins_a_side_and_a_product_with_an_input_branches() -> None:
    x, bias = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.zeros(2))
    weight, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    product = x @ weight.t() + bias
    found = divided([product, other.sin()], weight, other)
    assert {id(leaf) for leaf in found.due} == {id(x), id(bias)}
    assert found.at_once == []
    first, second = found.sides
    assert ([node.name() for node in second.branching], second.roots) == (["MmBackward0"], [])
    assert [one is weight for one in second.parameters] == [True]
    assert (first.branching, first.roots) == ([], [1])
    assert [one is other for one in first.parameters] == [True]
    (joined,) = divided([product, weight.t().sin()], weight).sides
    assert ([node.name() for node in joined.branching], joined.roots) == (["MmBackward0"], [1])
    assert [one is weight for one in joined.parameters] == [True]


class Both(torch.autograd.Function):
    """Product that computes both gradients at once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


def test_weights_behind_a_custom_function_are_due_at_once() -> None:
    x, weight, other = torch.ones(2, 2, requires_grad=True), nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    found = divided([Both.apply(x, weight.t()) * other], weight, other)
    assert [leaf is weight for leaf in found.at_once] == [True]
    assert {id(leaf) for leaf in found.due} == {id(x), id(weight)}
    (side,) = found.sides
    assert [one is other for one in side.parameters] == [True]

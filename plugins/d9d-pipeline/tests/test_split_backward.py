"""Gradients after both phases equal the gradients of a whole backward, for any graph. Shapes: [B, F] throughout."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from d9d_pipeline.runtime.split_backward import SplitBackward
from d9d_testing.toy.deferring import Deferring
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.smoke

FEATURES, SAMPLES = 4, 3
DOUBLE = torch.float64


class AtOnce(torch.autograd.Function):
    """``x @ weight``, both gradients in one go; may run once per graph, so nothing may repeat it needlessly."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Inject(torch.autograd.Function):
    """``carrier``; its backward begins a gradient of ``total``, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, carrier: Tensor, total: Tensor) -> Tensor:
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, torch.tensor(0.3, dtype=grad.dtype)


class Step(NamedTuple):
    """One op of a graph: which, on which two of the tensors so far, with which of the weights."""

    op: str
    a: int
    b: int
    weight: int


class Graph(nn.Module):
    """Computes a list of steps. ``outputs``: which of the tensors, or a parameter (-1), or a constant (-2)."""

    OPS = (
        *("linear", "linear", "deferring", "view", "product", "at_once", "scale", "add", "tanh", "halves"),
        *("inject", "inject_weight", "recompute", "cut", "square"),
    )

    def __init__(self, steps: Sequence[Step], outputs: Sequence[int], frozen: Collection[int] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.steps, self.outputs = steps, outputs
        self.linear = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(2))
        self.deferring = nn.ModuleList(Deferring(FEATURES) for _ in range(2))
        self.scales = nn.Parameter(torch.randn(FEATURES))
        self.matrices = nn.ParameterList(torch.randn(FEATURES, FEATURES) for _ in range(2))
        self.unused = nn.Linear(FEATURES, FEATURES)
        self.to(DOUBLE)
        for index, parameter in enumerate(self.parameters()):
            parameter.requires_grad_(index not in frozen)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        matrices = list(self.matrices)
        self.views = [matrix.t() for matrix in matrices]
        self.product = torch.tanh(matrices[0]) * matrices[1]  # saves what it multiplied
        pool = list(inputs)
        for step in self.steps:
            a, b, index = pool[step.a % len(pool)], pool[step.b % len(pool)], step.weight % 2
            pool.append(getattr(self, f"_{step.op}")(a, b, index))
        constant = torch.ones(SAMPLES, FEATURES, dtype=DOUBLE)
        return [
            {-1: self.matrices[0], -2: constant}[index] if index < 0 else pool[index % len(pool)]
            for index in self.outputs
        ]

    def _linear(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return self.linear[index](a)

    def _deferring(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return self.deferring[index](a)

    def _view(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return a @ self.views[index]

    def _product(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return a @ self.product

    def _at_once(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return AtOnce.apply(a, self.matrices[index])

    def _scale(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return a * self.scales

    def _add(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return a + b

    def _tanh(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return torch.tanh(a)

    def _halves(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        left, right = torch.chunk(self.linear[index](a), 2, dim=1)
        return torch.cat([right, b.chunk(2, dim=1)[0]], dim=1) if index else torch.cat([left.exp(), left], dim=1)

    def _inject(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return Inject.apply(a, (b @ self.matrices[index]).sum())

    def _inject_weight(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return Inject.apply(a, self.matrices[index].square().sum())

    def _recompute(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return checkpoint(lambda x: torch.tanh(self.linear[index](self.deferring[index](x))), a, use_reentrant=False)

    def _cut(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return a.detach()

    def _square(self, a: Tensor, b: Tensor, index: int) -> Tensor:
        return (a * self.linear[index].weight.sum()).sin()


def inputs_of(needed: Sequence[bool], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(SAMPLES, FEATURES, generator=generator, dtype=DOUBLE) for _ in needed]
    return [tensor.requires_grad_(need) for tensor, need in zip(drawn, needed, strict=True)]


def seeds_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(output.shape, generator=generator, dtype=DOUBLE) for output in outputs]


def gradients_of(graph: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in graph.named_parameters()}


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None], what: str) -> None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        where = f"{what} {index}"
        assert (one is None) == (other is None), where
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=lambda m, where=where: f"{where}: {m}")


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Step], list[int], set[int]]:
    position = st.integers(0, 12)
    step = st.builds(Step, st.sampled_from(Graph.OPS), position, position, st.integers(0, 1))
    steps = draw(st.lists(step, min_size=1, max_size=8))
    outputs = draw(st.lists(st.integers(-2, 12), max_size=2))
    # Most graphs hang on the last step.
    return steps, [*outputs, len(steps) + 1], draw(st.one_of(st.just(set()), st.sets(st.integers(0, 10), max_size=8)))


def chained(*ops: str) -> tuple[list[Step], list[int], set[int]]:
    """One op after the other, all with the same weight."""
    return [Step(op, 1 + index, 0, 0) for index, op in enumerate(ops)], [1 + len(ops)], set()


@pytest.mark.full
@settings(max_examples=250)
@example(chained("view", "deferring", "recompute", "view"), (True, True), set(), True)
@example(chained("product", "inject_weight", "halves", "product"), (True, True), set(), False)
@example(chained("inject", "at_once", "view", "scale", "linear"), (True, True), set(), True)
@example(([Step("view", 1, 0, 0), Step("deferring", 2, 0, 0)], [3], set()), (True, False), set(), True)
@example(([], [1, 1, -1, -2], set()), (True, False), set(), True)
@given(
    graphs(),
    st.sampled_from([(True, True), (True, False), (False, False)]),
    st.sets(st.sampled_from(["linear.0", "deferring", "unused", "matrices"])),
    st.booleans(),
)
def test_both_phases_give_the_gradients_of_a_whole_backward(
    graph: tuple[list[Step], list[int], set[int]], needed: tuple[bool, bool], whole: set[str], as_edges: bool
) -> None:
    expected, found = Graph(*graph), Graph(*graph)
    split = SplitBackward(found, whole)
    plain = [inputs_of(needed, seed) for seed in (1, 2)]
    halved = [inputs_of(needed, seed) for seed in (1, 2)]
    for leaves in plain:
        outputs = expected(*leaves)
        pairs = [(o, s) for o, s in zip(outputs, seeds_of(outputs), strict=True) if o.requires_grad]
        if pairs:
            torch.autograd.backward(*zip(*pairs, strict=True))
    phases = []
    for leaves in halved:
        outputs = found(*leaves)
        seeds = seeds_of(outputs)
        roots = [get_gradient_edge(o) if as_edges and o.requires_grad else o for o in outputs]
        del outputs
        phases.append(split.inputs(roots, seeds, leaves))
    for leaves, others in zip(halved, plain, strict=True):
        assert_equal([leaf.grad for leaf in leaves], [leaf.grad for leaf in others], "input")
    for phase in phases[::-1]:
        phase.run()
    for leaves, others in zip(halved, plain, strict=True):
        assert_equal([leaf.grad for leaf in leaves], [leaf.grad for leaf in others], "input, after all")
    assert_equal([*gradients_of(found).values()], [*gradients_of(expected).values()], "parameter")


@settings(max_examples=60)
@given(graph=graphs(), needed=st.sampled_from([(True, True), (False, False)]))
def test_a_backward_in_one_is_that_of_autograd(
    graph: tuple[list[Step], list[int], set[int]], needed: tuple[bool, bool]
) -> None:
    expected, found = Graph(*graph), Graph(*graph)
    split = SplitBackward(found)
    plain, in_one = inputs_of(needed, 1), inputs_of(needed, 1)
    outputs = expected(*plain)
    pairs = [(o, s) for o, s in zip(outputs, seeds_of(outputs), strict=True) if o.requires_grad]
    if pairs:
        torch.autograd.backward(*zip(*pairs, strict=True))
    outputs = found(*in_one)
    split.backward(outputs, seeds_of(outputs))
    assert_equal([leaf.grad for leaf in in_one], [leaf.grad for leaf in plain], "input")
    assert_equal([*gradients_of(found).values()], [*gradients_of(expected).values()], "parameter")

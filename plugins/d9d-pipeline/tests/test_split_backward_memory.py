"""Tensors kept between the phases, repeated computations, and the method chosen for each module. Shapes: [B, F]."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from d9d_pipeline.runtime.split_backward import SplitBackward, WeightPhase
from d9d_testing.toy.deferring import Deferring
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.smoke
FEATURES, SAMPLES = 4, 3


class Fused(nn.Module):
    """A foreign layer whose op computes both gradients in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(FEATURES, FEATURES))

    def forward(self, x: Tensor) -> Tensor:
        return _Fused.apply(x, self.weight)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Witness(nn.Module):
    """The identity; saves a tensor for the backward whose life can be watched, and counts its backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.saved: Callable[[], Tensor | None] = lambda: None
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        return _Witness.apply(x, self)


class _Witness(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, witness: Witness) -> Tensor:
        kept = x + 1
        witness.saved = weakref.ref(kept)
        ctx.save_for_backward(kept)
        ctx.witness = witness
        return x + 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.saved_tensors
        ctx.witness.backwards += 1
        return grad, None


@pytest.fixture(autouse=True)
def _reference_counts_alone() -> Iterator[None]:
    """What only the garbage collector would free counts as alive."""
    gc.disable()
    yield
    gc.enable()


def chain(kind: Callable[[], nn.Module]) -> tuple[nn.Sequential, list[Witness]]:
    torch.manual_seed(0)
    witnesses = [Witness() for _ in range(3)]
    layers = [layer for witness in witnesses[:-1] for layer in (witness, kind())]
    return nn.Sequential(*layers, nn.LayerNorm(FEATURES), witnesses[-1]), witnesses


def input_phase(split: SplitBackward, stage: nn.Module, x: Tensor) -> tuple[WeightPhase, Callable[[], Tensor | None]]:
    out = stage(x)
    edge, boundary = get_gradient_edge(out), weakref.ref(out)
    del out
    return split.inputs([edge], [torch.ones(SAMPLES, FEATURES)], [x]), boundary


def leaf() -> Tensor:
    return torch.randn(SAMPLES, FEATURES, generator=torch.Generator().manual_seed(1)).requires_grad_()


def deferring() -> nn.Module:
    return Deferring(FEATURES)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, FEATURES)


def alive(witnesses: list[Witness]) -> list[bool]:
    return [witness.saved() is not None for witness in witnesses]


@pytest.mark.parametrize("kind", [deferring, linear, Fused])
def test_nothing_stays_alive_after_the_weight_phase(kind: Callable[[], nn.Module]) -> None:
    stage, witnesses = chain(kind)
    weights, boundary = input_phase(SplitBackward(stage), stage, leaf())
    assert boundary() is None
    weights.run()
    assert alive(witnesses) == [False, False, False]
    assert all(parameter.grad is not None for parameter in stage.parameters())
    assert [witness.backwards for witness in witnesses] == [1, 1, 1]


def test_modules_that_defer_let_the_graph_go_in_the_input_phase() -> None:
    stage, witnesses = chain(deferring)
    weights, _ = input_phase(SplitBackward(stage), stage, leaf())
    assert alive(witnesses) == [False, False, False]
    assert stage[1].weight.grad is None
    weights.run()


def test_the_walk_keeps_only_what_leads_to_its_weights() -> None:
    stage, witnesses = chain(linear)
    weights, _ = input_phase(SplitBackward(stage), stage, leaf())
    assert alive(witnesses) == [True, True, False]  # the last one lies above all weights
    assert stage[1].weight.grad is None
    assert stage[1].bias.grad is not None  # no matrix product: it does not wait
    seen: list[list[bool]] = []
    stage[1].weight.register_post_accumulate_grad_hook(lambda _: seen.append(alive(witnesses)))
    weights.run()
    assert seen == [[True, False, False]]  # freed weight by weight


def test_what_comes_at_once_is_not_asked_for_again() -> None:
    stage, witnesses = chain(Fused)
    split = SplitBackward(stage)
    for _ in range(2):
        weights, _ = input_phase(split, stage, leaf())
        assert alive(witnesses) == [False, False, False]
        assert stage[1].weight.grad is not None
        weights.run()
        stage.zero_grad()


def test_a_small_foreign_weight_is_not_worth_a_graph() -> None:
    stage, witnesses = chain(deferring)
    stage.append(nn.Linear(FEATURES, 1))
    for _ in range(6):
        stage.insert(0, deferring())
    out = stage(x := leaf())
    weights = SplitBackward(stage).inputs([out], [torch.ones_like(out)], [x])
    assert stage[-1].weight.grad is not None
    del out
    assert alive(witnesses) == [False, False, False]
    weights.run()


@pytest.mark.parametrize("kind", [deferring, linear])
def test_modules_named_whole_take_their_backward_in_the_input_phase(kind: Callable[[], nn.Module]) -> None:
    stage, _ = chain(kind)
    weights, _ = input_phase(SplitBackward(stage, whole=["1"]), stage, leaf())
    assert [stage[1].weight.grad is None, stage[3].weight.grad is None] == [False, True]
    weights.run()
    assert stage[3].weight.grad is not None


@pytest.mark.thorough
@pytest.mark.parametrize(("whole", "forwards"), [(["block"], 2), ([], 3)])
def test_a_checkpointed_block_is_recomputed_once_if_it_is_named(whole: list[str], forwards: int) -> None:
    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.last, self.calls = linear(), linear(), 0

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.count, x, use_reentrant=False))

        def count(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.tanh(self.block(x))

    stage = Stage()
    weights, _ = input_phase(SplitBackward(stage, whole), stage, leaf())
    weights.run()
    assert stage.calls == forwards


def test_hooks_on_tensors_change_a_gradient_once() -> None:
    found = []
    for halved in (False, True):
        torch.manual_seed(0)
        first, second, x = linear(), linear(), leaf()
        between = first(x)
        between.register_hook(lambda gradient: gradient * 3)
        out = second(between)
        if halved:
            SplitBackward(nn.Sequential(first, second)).inputs([out], [torch.ones_like(out)], [x]).run()
        else:
            out.backward(torch.ones_like(out))
        found.append([x.grad, first.weight.grad, first.bias.grad, second.weight.grad])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_narrow_formats_and_autocast_change_nothing(dtype: torch.dtype, autocast: bool) -> None:
    found = []
    for halved in (False, True):
        torch.manual_seed(0)
        middle = linear() if autocast else deferring()  # the toy's op casts nothing
        stage, x = nn.Sequential(linear(), nn.Tanh(), middle, linear()).to(dtype), leaf()
        split = SplitBackward(stage)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = stage(x.to(dtype))
        seed = torch.ones_like(out)
        if halved:
            split.inputs([out], [seed], [x]).run()
        else:
            split.backward([out], [seed])
        found.append([x.grad, *(parameter.grad for parameter in stage.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_a_failed_input_phase_leaves_nothing_behind() -> None:
    stage, _ = chain(deferring)
    split, x = SplitBackward(stage), leaf()
    out = stage(x)
    with pytest.raises(RuntimeError, match="shape"):
        split.inputs([out], [torch.ones(1, 1)], [x])
    split.backward([out], [torch.ones_like(out)])
    assert all(parameter.grad is not None for parameter in stage.parameters())

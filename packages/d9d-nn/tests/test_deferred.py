"""Layers that defer weight gradients compute the same results as layers that do not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from d9d_core.deferral import Deferral
from d9d_core.kernel import OpSignature
from d9d_core.model import LendsProduct
from d9d_core.traits import DefersWeights
from d9d_nn.linear import Linear
from d9d_nn.ops import grouped_linear_torch
from d9d_nn.ops.deferred import as_autocast_together
from d9d_nn.ops.grouped_linear import grouped_linear
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.smoke
WAYS = ("without", "at once", "late")
SHAPES = [(8,), (5, 8), (3, 5, 8), (0, 8)]
BACKENDS = {
    "reference": grouped_linear,
    "grouped_mm": grouped_linear_torch.build(OpSignature("grouped_linear", "cpu", "float32")),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def results(way: str, call: Callable[[Deferral | None], Tensor], *leaves: Tensor) -> list[Tensor | None]:
    """Output and gradients of the leaves; the gradient of the last leaf may wait."""
    for leaf in leaves:
        leaf.grad = None
    deferral = None if way == "without" else Deferral()
    out = call(deferral)
    seed = normal(*out.shape, seed=9).to(out.dtype)
    if way == "late":
        assert deferral is not None
        with deferral.collect() as left:
            out.backward(seed)
        assert leaves[-1].grad is None
        left.run()
    else:
        out.backward(seed)
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("autocast", [False, True])
def test_linear_is_the_same_bit_for_bit(dtype: torch.dtype, autocast: bool) -> None:
    for shape, bias, needed in product(SHAPES, (False, True), (False, True)):
        layer = Linear(8, 6, std=1.0, bias=bias).to(dtype)
        x = normal(*shape).to(dtype).requires_grad_(needed)

        def call(deferral: Deferral | None, layer: Linear = layer, x: Tensor = x) -> Tensor:
            layer.defer_to(deferral)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out: Tensor = layer(x)
            return out

        leaves = [x, *([layer.bias] if bias else []), layer.weight]
        plain, *others = (results(way, call, *leaves) for way in WAYS)
        for found in others:
            assert_same(found, plain)


def test_a_frozen_weight_and_a_layer_without_gradients_leave_nothing() -> None:
    layer, deferral = Linear(8, 6, std=1.0), Deferral()
    layer.defer_to(deferral)
    with torch.no_grad():
        assert not layer(normal(2, 8)).requires_grad
    layer.weight.requires_grad_(False)
    x = normal(2, 8).requires_grad_()
    with deferral.collect() as left:
        layer(x).sum().backward()
    assert len(left) == 0
    assert x.grad is not None


def test_a_layer_lets_go_of_its_deferral() -> None:
    layer, deferral = Linear(8, 6, std=1.0), Deferral()
    assert isinstance(layer, DefersWeights)
    assert list(layer.defer_to(deferral)) == ["weight"]
    layer.defer_to(None)
    with deferral.collect() as left:
        layer(normal(2, 8)).sum().backward()
    assert len(left) == 0
    assert layer.weight.grad is not None


def test_a_layer_leaves_nothing_that_nobody_wants_later() -> None:
    layer, deferral = Linear(8, 6, std=1.0), Deferral()
    layer.defer_to(deferral)
    deferral.wanted = False
    out = layer(normal(2, 8))
    deferral.wanted = True  # as another forward wants
    with deferral.collect() as left:
        out.sum().backward()
    assert len(left) == 0
    assert layer.weight.grad is not None


@pytest.mark.thorough
def test_a_compiled_layer_computes_at_once() -> None:
    layer, deferral = Linear(8, 6, std=1.0), Deferral()
    layer.defer_to(deferral)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    with deferral.collect() as left:
        compiled(normal(2, 8)).sum().backward()
    assert len(left) == 0
    assert layer.weight.grad is not None


def test_a_checkpointed_layer_leaves_its_gradient_once() -> None:
    layers, deferral = nn.Sequential(Linear(8, 8, std=1.0), nn.Tanh(), Linear(8, 8, std=1.0)), Deferral()
    gradients = []
    for late in (False, True):
        layers.zero_grad()
        for layer in (layers[0], layers[2]):
            layer.defer_to(deferral if late else None)
        with deferral.collect() as left:
            checkpoint(layers, normal(2, 8).requires_grad_(), use_reentrant=False).sum().backward()
        assert len(left) == 2 * late
        left.run()
        gradients.append([parameter.grad for parameter in layers.parameters()])
    assert_same(gradients[1], gradients[0])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("autocast", [False, True])
def test_grouped_linear_leaves_the_gradient_of_the_bank(backend: str, autocast: bool) -> None:
    counts = torch.tensor([3, 0, 2, 1])
    for spare, needed in product((0, 2), (False, True)):
        x = normal(6 + spare, 8).requires_grad_(needed)
        bank = normal(4, 8, 16, seed=1).requires_grad_()

        def call(deferral: Deferral | None, x: Tensor = x, bank: Tensor = bank, spare: int = spare) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                return BACKENDS[backend](x, bank, counts, spare_rows=spare > 0, deferral=deferral)

        plain, *others = (results(way, call, x, bank) for way in WAYS)
        for found in others:
            for one, other in zip(found, plain, strict=True):
                assert (one is None) == (other is None)
                if one is not None and other is not None:
                    torch.testing.assert_close(one, other)


def test_a_layer_asks_who_computes_its_product_and_adds_its_own_bias() -> None:
    layer = Linear(8, 5, std=0.1, bias=True)
    nn.init.normal_(layer.bias)
    known, other = normal(3, 8), normal(3, 8, seed=1)
    assert isinstance(layer, LendsProduct)
    assert layer.lend_product(lambda rows: torch.ones(3, 5) if rows is known else None)
    assert torch.equal(layer(known), (1 + layer.bias).expand(3, 5))
    assert torch.equal(layer(other), nn.functional.linear(other, layer.weight, layer.bias))
    deferral = Deferral()
    layer.defer_to(deferral)
    assert layer.deferral is deferral


def test_weights_that_autocast_casts_together_follow_each_other_in_memory() -> None:
    weights = [torch.randn(rows, 4, requires_grad=True) for rows in (3, 2)]
    assert all(one is other for one, other in zip(as_autocast_together(weights), weights, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        first, second = as_autocast_together(weights)
        narrow = [weight.detach().bfloat16() for weight in weights]
        assert all(one is other for one, other in zip(as_autocast_together(narrow), narrow, strict=True))
    assert second.data_ptr() == first.data_ptr() + first.nbytes
    for cast, weight in zip((first, second), weights, strict=True):
        assert torch.equal(cast, weight.bfloat16())
        (grad,) = torch.autograd.grad(cast.sum(), weight)
        assert torch.equal(grad, torch.ones_like(weight))


@pytest.mark.smoke
def test_weights_that_are_cast_together_stay_separate_in_a_compiled_function_without_gradients() -> None:
    weights = [torch.randn(2, 3, requires_grad=True), torch.randn(4, 3, requires_grad=True)]

    @torch.compile(backend="eager")
    def cast(*weights: Tensor) -> list[Tensor]:
        return as_autocast_together(weights)

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = cast(*weights)
    assert [one.shape for one in found] == [(2, 3), (4, 3)]
    assert all(one.equal(weight.bfloat16()) for one, weight in zip(found, weights, strict=True))

"""Padding counts nowhere: a padded microbatch gives what its samples give without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_moe.balancing.balancers import BatchBalance, SequenceBalance, SignUpdate, ZLoss
from d9d_moe.balancing.base import Balancer
from d9d_moe.dispatch.local import LocalDispatcher
from d9d_moe.experts.grouped_swiglu import GroupedSwiGLU
from d9d_moe.experts.layer import MoELayer
from d9d_moe.router.top_k import TopKRouter
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from torch import Tensor

HIDDEN, EXPERTS, TOP_K = 8, 6, 2
LENGTHS = (5, 1, 7)
LOSSES = (SequenceBalance(0.5), ZLoss(0.1))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def samples() -> list[Tensor]:
    """Samples [S, H] of several lengths."""
    return [normal(length, HIDDEN, seed=length) for length in LENGTHS]


def padded(to: int) -> tuple[Tensor, Tensor]:
    """The samples [B, S, H], padded with anything, and the mask [B, S]."""
    rows = [torch.cat([sample, 50 * normal(to - len(sample), HIDDEN, seed=9)]) for sample in samples()]
    return torch.stack(rows), torch.arange(to) >= torch.tensor(LENGTHS).unsqueeze(1)


def router(*balancing: Balancer, **options: Any) -> TopKRouter:
    made = TopKRouter(HIDDEN, EXPERTS, TOP_K, std=0.3, balancing=balancing, **options)
    with torch.no_grad():
        made.weight.copy_(0.5 * normal(EXPERTS, HIDDEN, seed=1))
        for factor in made.loss_factors().values():
            factor.fill_(0.3)
    return made


@pytest.mark.thorough
@pytest.mark.parametrize("to", [7, 12])
def test_losses_and_tallies_are_sums_over_samples_without_padding(to: int) -> None:
    whole, alone = router(*LOSSES), router(*LOSSES)
    hidden, padding = padded(to)
    routing = whole(hidden.flatten(0, 1), samples=len(LENGTHS), padding=padding.flatten())
    routing.weights.sum().backward()
    expected: dict[str, Tensor] = {}
    for sample in samples():
        alone(sample).weights.sum().backward()
        for name, value in {**alone.loss_sums(), **alone.tallies()}.items():
            expected[name] = expected.get(name, 0) + value.clone()
    for name, value in {**whole.loss_sums(), **whole.tallies()}.items():
        assert_close_values(value.float(), expected[name].float(), what=name)
    assert whole.tallies()["tokens"] == sum(LENGTHS)
    assert_close_gradients({"weight": whole.weight.grad}, {"weight": alone.weight.grad})
    assert (routing.indices[padding.flatten()] == EXPERTS).all()
    assert not routing.weights[padding.flatten()].any()
    assert routing.counts.sum() == sum(LENGTHS) * TOP_K


def test_a_microbatch_is_balanced_as_a_whole_without_its_padding() -> None:
    whole, alone = router(BatchBalance(0.5)), router(BatchBalance(0.5))
    hidden, padding = padded(9)
    whole(hidden.flatten(0, 1), samples=3, padding=padding.flatten())
    alone(torch.cat(samples()))
    assert_close_values(whole.loss_sums()["router_balance"], alone.loss_sums()["router_balance"])


@pytest.mark.parametrize("capacity", [0.5, 1.0, 1.3])
def test_capacity_is_that_of_the_tokens_without_padding(capacity: float) -> None:
    hidden, padding = padded(11)
    real = ~padding.flatten()
    whole, alone = router(capacity=capacity), router(capacity=capacity)
    routing = whole(hidden.flatten(0, 1), samples=3, padding=padding.flatten())
    expected = alone(torch.cat(samples()))
    assert torch.equal(routing.indices[real], expected.indices)
    assert_close_values(routing.weights[real], expected.weights)
    assert torch.equal(routing.counts, expected.counts)
    assert whole.tallies()["dropped"] == alone.tallies()["dropped"]
    assert routing.counts.max() <= routing.limit


def test_a_bias_follows_the_load_without_padding() -> None:
    hidden, padding = padded(12)
    moved = []
    for tokens, mask in ((hidden.flatten(0, 1), padding.flatten()), (torch.cat(samples()), None)):
        made = router(SignUpdate(0.1))
        made(tokens, padding=mask)
        made.adapt(made.tallies(), torch.tensor(True))
        moved.append(made.selection_bias)
    assert torch.equal(*moved)


@pytest.mark.parametrize("capacity", [None, 1.0])
def test_no_expert_computes_padding(capacity: float | None) -> None:
    torch.manual_seed(0)
    bank = GroupedSwiGLU(HIDDEN, 12, EXPERTS, std=0.3, output_std=0.3)
    layer = MoELayer(router(*LOSSES, capacity=capacity), bank, LocalDispatcher())
    hidden, padding = padded(10)
    expected = torch.cat(samples()).requires_grad_()
    hidden.requires_grad_()
    out = layer(hidden, padding)
    assert not out[padding].any()
    (out * normal(3, 10, HIDDEN, seed=4)).sum().backward()
    found = {name: p.grad.clone() for name, p in layer.named_parameters()} | {"hidden": hidden.grad[~padding]}
    assert not hidden.grad[padding].any()
    layer.zero_grad()
    parts = expected.split(LENGTHS)
    if capacity is None:  # else samples share it
        alone = torch.cat([layer(part.unsqueeze(0))[0] for part in parts])
        assert_close_values(out[~padding], alone)
        (alone * normal(3, 10, HIDDEN, seed=4)[~padding]).sum().backward()
        grads = {name: p.grad for name, p in layer.named_parameters()} | {"hidden": expected.grad}
        assert_close_gradients(found, grads)


def test_a_microbatch_of_padding_alone_adds_nothing() -> None:
    made = router(*LOSSES)
    routing = made(normal(8, HIDDEN), samples=2, padding=torch.ones(8, dtype=torch.bool))
    routing.weights.sum().backward()
    assert not any(value.any() for value in (*made.loss_sums().values(), *made.tallies().values()))
    assert not made.weight.grad.any()


@pytest.mark.thorough
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_a_router_with_padding_compiles_whole() -> None:
    hidden, padding = padded(9)
    plain, compiled = router(*LOSSES, capacity=0.7), router(*LOSSES, capacity=0.7)
    expected = plain(hidden.flatten(0, 1), 3, padding.flatten())
    actual = torch.compile(compiled, backend="aot_eager", fullgraph=True)(hidden.flatten(0, 1), 3, padding.flatten())
    assert torch.equal(actual.indices, expected.indices)
    assert_close_values(compiled.loss_sums()["router_z"], plain.loss_sums()["router_z"])

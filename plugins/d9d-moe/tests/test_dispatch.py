"""Dispatch and combine against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from d9d_moe.dispatch.local import LocalDispatcher, LocalHandle, sort_by_expert
from d9d_moe.dispatch.permutation import permute, unpermute
from d9d_moe.router.routing import TopKRouting
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

HIDDEN, EXPERTS = 6, 5


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def routing(indices: list[list[int]], top_k: int = 2, dtype: torch.dtype = torch.float32) -> TopKRouting:
    chosen = torch.tensor(indices, dtype=torch.int64).view(-1, top_k)
    return TopKRouting.of(chosen, normal(*chosen.shape, seed=1, dtype=dtype), EXPERTS)


def through_experts(tokens: Tensor, chosen: TopKRouting, matrices: Tensor) -> Tensor:
    """Dispatch, a matrix [H, H] for each expert, combine."""
    dispatcher = LocalDispatcher()
    sent = dispatcher.dispatch(tokens, chosen).wait()
    expert = torch.arange(EXPERTS).repeat_interleave(sent.counts)
    return dispatcher.combine(torch.einsum("rh,rhi->ri", sent.tokens, matrices[expert]), sent.handle).wait()


def token_by_token(tokens: Tensor, chosen: TopKRouting, matrices: Tensor) -> Tensor:
    out = 0 * tokens  # of no tokens, it has a graph still
    for token in range(len(tokens)):
        for index, weight in zip(chosen.indices[token], chosen.weights[token], strict=True):
            out[token] += weight * (tokens[token] @ matrices[index])
    return out


CASES = {
    "spread": [[0, 3], [3, 1], [1, 0], [4, 3]],
    "one_expert_for_all": [[2, 2], [2, 2], [2, 2]],
    "repeated_experts": [[1, 1], [0, 1], [4, 4]],
    "one_token": [[4, 0]],
    "no_token": [],
}


@pytest.mark.smoke
@pytest.mark.parametrize("nobody", [2**8 - 1, 2**8, 2**15 - 1, 2**15])
def test_choices_are_sorted_however_many_experts_there_are(nobody: int) -> None:
    experts = torch.randint(nobody + 1, (50, 7), generator=torch.Generator().manual_seed(0))
    experts[3], experts[4], experts[5] = nobody, nobody - 1, 0
    slots, places = sort_by_expert(experts, experts.numel(), nobody)
    assert torch.equal(slots, torch.sort(experts.flatten(), stable=True).indices)
    assert torch.equal(places.flatten()[slots], torch.arange(experts.numel()))


@pytest.mark.smoke
@pytest.mark.parametrize("indices", CASES.values(), ids=CASES)
def test_experts_see_their_tokens_and_tokens_their_experts(indices: list[list[int]]) -> None:
    found = []
    for function in (through_experts, token_by_token):
        chosen = routing(indices, dtype=torch.float64)
        tokens = normal(len(indices), HIDDEN, dtype=torch.float64).requires_grad_()
        matrices = normal(EXPERTS, HIDDEN, HIDDEN, seed=2, dtype=torch.float64).requires_grad_()
        chosen.weights.requires_grad_()
        out = function(tokens, chosen, matrices)
        (out * normal(*out.shape, seed=3, dtype=torch.float64)).sum().backward()
        inputs = {"tokens": tokens, "weights": chosen.weights, "matrices": matrices}
        # The loop over no tokens uses nothing else.
        grads = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in inputs.items()}
        found.append({"out": out.detach()} | grads)
    assert_close_values(found[0]["out"], found[1]["out"])
    assert_close_gradients(*found)


@given(
    top_k=st.integers(1, 4),
    indices=st.lists(st.lists(st.integers(0, EXPERTS - 1), min_size=4, max_size=4), max_size=12),
)
@settings(max_examples=100)
def test_rows_are_sorted_by_expert_and_then_by_token(top_k: int, indices: list[list[int]]) -> None:
    chosen = routing([row[:top_k] for row in indices], top_k)
    tokens = torch.arange(len(indices), dtype=torch.float32).unsqueeze(1)
    sent = LocalDispatcher().dispatch(tokens, chosen).wait()
    expected = sorted((expert, token) for token, row in enumerate(indices) for expert in row[:top_k])
    assert sent.tokens.flatten().tolist() == [token for _, token in expected]
    assert sent.counts.tolist() == [sum(expert == e for expert, _ in expected) for e in range(EXPERTS)]
    assert not sent.spare_rows


def test_a_token_comes_back_as_the_sum_of_its_weights() -> None:
    chosen, tokens = routing(CASES["spread"]), normal(4, HIDDEN)
    dispatcher = LocalDispatcher()
    sent = dispatcher.dispatch(tokens, chosen).wait()
    assert_close_values(
        dispatcher.combine(sent.tokens, sent.handle).wait(), tokens * chosen.weights.sum(1, keepdim=True)
    )


def test_with_a_limit_there_is_room_for_no_more_rows_than_experts_take() -> None:
    nobody = EXPERTS
    chosen = TopKRouting.of(
        torch.tensor([[0, 3], [3, 0], [nobody, nobody]]), torch.tensor([[1.0, 2], [3, 4], [0, 0]]), 5, 2
    )
    tokens = torch.arange(1.0, 4).unsqueeze(1)
    sent = LocalDispatcher().dispatch(tokens, chosen).wait()
    assert sent.spare_rows
    assert sent.counts.tolist() == [2, 0, 0, 2, 0]
    assert sent.tokens[:4].flatten().tolist() == [1, 2, 1, 2]
    assert LocalDispatcher().combine(sent.tokens, sent.handle).wait().flatten().tolist() == [3, 14, 0]
    few = TopKRouting.of(torch.tensor([[0, 0], [0, 1], [1, 1]]), torch.ones(3, 2), experts=1, limit=3)
    assert len(LocalDispatcher().dispatch(tokens, few).wait().tokens) == 3


@pytest.mark.parametrize(("limit", "rows", "absent"), [(None, 6, False), (2, 6, False), (1, 3, True)])
def test_choices_are_absent_only_if_there_is_not_a_row_for_each(limit: int | None, rows: int, absent: bool) -> None:
    chosen = TopKRouting.of(torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.ones(3, 2), experts=3, limit=limit)
    sent = LocalDispatcher().dispatch(torch.ones(3, 1), chosen).wait()
    assert isinstance(sent.handle, LocalHandle)
    assert (len(sent.tokens), sent.handle.absent) == (rows, absent)


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_absent_choices_count_as_zero_whatever_rows_hold(weighted: bool) -> None:
    slots, places = torch.tensor([3, 0]), torch.tensor([[1, 9], [2, 0]])  # rows 0 and 1; the others have none
    rows = torch.tensor([[float("inf")], [2.0]]).requires_grad_()
    weights = torch.tensor([[3.0, 5], [7, 1]]).requires_grad_()
    extra = (weights,) if weighted else ()
    out = unpermute(rows, slots, places, *extra, absent=True)
    out[0].sum().backward()
    assert out.flatten().tolist() == [6.0 if extra else 2.0, float("inf")]
    assert rows.grad.flatten().tolist() == [0.0, 3.0 if extra else 1.0]
    if extra:
        assert weights.grad[0].tolist() == [2, 0]
        assert weights.grad[1, 0].item() == 0


def test_gradients_of_gathered_rows_skip_absent_choices() -> None:
    tokens = torch.ones(2, 1, requires_grad=True)
    permute(tokens, torch.tensor([3, 0]), torch.tensor([[1, 9], [2, 0]]), absent=True).backward(
        torch.tensor([[10.0], [1.0]])
    )
    assert tokens.grad.flatten().tolist() == [1, 10]
    nothing = torch.ones(2, 1, requires_grad=True)
    permute(nothing, torch.zeros(0, dtype=torch.int64), torch.full((2, 2), 4), absent=True).sum().backward()
    assert not nothing.grad.any()


def test_sums_of_bfloat16_rows_are_rounded_once() -> None:
    places = torch.arange(64).view(8, 8)
    rows, weights = normal(64, HIDDEN, dtype=torch.bfloat16).requires_grad_(), normal(8, 8, seed=1)
    exact = (rows.double()[places] * weights.double().unsqueeze(2)).sum(1)
    assert torch.equal(unpermute(rows, torch.arange(64), places, weights), exact.float().bfloat16())
    tokens = normal(8, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    grad = normal(64, HIDDEN, seed=2, dtype=torch.bfloat16)
    permute(tokens, torch.arange(64), places).backward(grad)
    assert torch.equal(tokens.grad, grad.double()[places].sum(1).float().bfloat16())


def test_gradients_of_weights_stay_float32_for_bfloat16_rows() -> None:
    places = torch.tensor([[1, 0], [2, 3]])
    rows = normal(4, HIDDEN, dtype=torch.bfloat16).requires_grad_()
    weights, grad = normal(2, 2, seed=1).requires_grad_(), normal(2, HIDDEN, seed=2, dtype=torch.bfloat16)
    unpermute(rows, torch.tensor([1, 0, 2, 3]), places, weights).backward(grad)
    assert_close_values(weights.grad, (rows.detach().float()[places] * grad.float().unsqueeze(1)).sum(2))
    assert rows.grad.dtype == torch.bfloat16


@pytest.mark.thorough
@pytest.mark.smoke
@pytest.mark.filterwarnings("default:.*should not be instantiated:DeprecationWarning")  # Dynamo's own, in torch 2.11
def test_compiled_whole_it_has_the_same_gradients_in_float32() -> None:
    indices = torch.tensor(CASES["repeated_experts"])

    def there_and_back(tokens: Tensor, weights: Tensor) -> Tensor:
        sent = LocalDispatcher().dispatch(tokens, TopKRouting.of(indices, weights, EXPERTS, limit=2)).wait()
        return LocalDispatcher().combine(sent.tokens.sin(), sent.handle).wait()

    found = []
    for function in (there_and_back, torch.compile(there_and_back, backend="aot_eager", fullgraph=True)):
        tokens, weights = normal(3, HIDDEN).requires_grad_(), normal(3, 2, seed=1).requires_grad_()
        (function(tokens, weights) * normal(3, HIDDEN, seed=2)).sum().backward()
        found.append({"tokens": tokens.grad, "weights": weights.grad})
    assert_close_gradients(*found)


@pytest.mark.smoke
def test_nothing_is_read_on_the_host() -> None:
    tokens = torch.empty(7, HIDDEN, device="meta", requires_grad=True)
    weights = torch.empty(7, 2, device="meta", requires_grad=True)
    chosen = TopKRouting.of(torch.empty(7, 2, dtype=torch.int64, device="meta"), weights, EXPERTS)
    dispatcher = LocalDispatcher()
    sent = dispatcher.dispatch(tokens, chosen).wait()
    out = dispatcher.combine(sent.tokens, sent.handle).wait()
    out.sum().backward()
    assert sent.tokens.shape == (14, HIDDEN)
    assert sent.counts.shape == (EXPERTS,)
    assert out.shape == tokens.grad.shape == tokens.shape
    assert weights.grad.shape == weights.shape

"""The loss from shares of the vocabulary equals the loss over the whole vocabulary."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_core.model import VocabularyShare
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy_with_ranks
from d9d_nn.ops.vocabulary_parallel import VocabularyParallelCrossEntropy, gather_words
from d9d_testing.tolerances import assert_close_gradients, assert_close_values
from d9d_testing.world import RankFailedError, World
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch import distributed as dist


def drawn(words: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [2, 5, 6], a weight and targets, some of which are not predicted and have NaN before them."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 5, 6, generator=generator)
    targets = torch.randint(words, (2, 5), generator=generator)
    targets[:, 1] = IGNORE
    hidden[0, 1] = torch.nan
    return hidden.to(dtype), torch.randn(words, 6, generator=generator).to(dtype), targets


def share_of(weight: Tensor) -> tuple[Tensor, int]:
    """This rank's rows, as DTensors cut, and the first of them."""
    rank, most = dist.get_rank(), -(-len(weight) // dist.get_world_size())
    return weight[rank * most : (rank + 1) * most], min(len(weight), rank * most)


def computed(words: int, seed: int, options: dict[str, Any]) -> dict[str, Tensor]:
    hidden, weight, targets = drawn(words, seed)
    share, first = share_of(weight)
    leaves = hidden.requires_grad_(), share.clone().requires_grad_()
    loss = VocabularyParallelCrossEntropy(first, dist.group.WORLD)
    losses, ranks = loss.with_ranks(*leaves, targets, **options)
    assert torch.equal(losses, loss(*leaves, targets, **options))
    (losses * torch.arange(10).view(2, 5)).sum().backward()
    grad = leaves[0].grad
    assert grad is not None
    dist.all_reduce(grad)
    weights = [torch.zeros(-(-words // 3), 6) for _ in range(3)]
    mine = leaves[1].grad
    assert mine is not None
    padded = torch.zeros_like(weights[0])
    padded[: len(mine)] = mine
    dist.all_gather(weights, padded)
    part = torch.nn.functional.linear(hidden.detach(), share).requires_grad_()
    logits = gather_words(part, words, VocabularyShare(first, len(share), dist.group.WORLD))
    (logits * torch.arange(words)).sum().backward()
    assert part.grad is not None
    assert torch.equal(part.grad, torch.arange(first, first + len(share)).float().expand_as(part))
    return {
        "loss": losses.detach(),
        "ranks": ranks,
        "hidden": grad,
        "weight": torch.cat(weights)[:words],
        "logits": logits.detach(),
    }


def many(cases: list[tuple[int, int, dict[str, Any]]]) -> list[dict[str, Tensor]]:
    return [computed(*case) for case in cases]


@pytest.mark.thorough
def test_losses_ranks_and_gradients_are_those_of_all_words() -> None:
    """Of vocabularies that three ranks do not divide, and of which the last have no word at all."""
    cases = [
        (words, seed, options)
        for seed, (words, options) in enumerate(
            [(12, {}), (11, {"rows": 3, "keep": False}), (4, {"rows": 4}), (2, {}), (1, {"keep": True})]
        )
    ]
    for of_rank in World(3).run(many, cases):
        for (words, seed, _), found in zip(cases, of_rank, strict=True):
            assert_is_that_of_all_words(found, words, seed)


def assert_is_that_of_all_words(found: dict[str, Tensor], words: int, seed: int) -> None:
    hidden, weight, targets = drawn(words, seed)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    losses, ranks = linear_cross_entropy_with_ranks(*leaves, targets)
    (losses * torch.arange(10).view(2, 5)).sum().backward()
    assert_close_values(found["loss"], losses.detach())
    assert torch.equal(found["ranks"], ranks)
    known = ~hidden.detach().isnan()[..., 0]
    logits = torch.nn.functional.linear(hidden.detach(), weight.detach())
    assert_close_values(found["logits"][known], logits[known])
    if words > 1:  # the gradient of one word's loss is rounding only
        exact = {"hidden": leaves[0].grad, "weight": leaves[1].grad}
        assert_close_gradients({name: found[name] for name in exact}, exact)


def wrong(word: int) -> None:
    hidden, weight, targets = drawn(12, 0)
    targets[1, 3] = word
    share, first = share_of(weight)
    VocabularyParallelCrossEntropy(first, dist.group.WORLD)(hidden, share, targets)


@pytest.mark.parametrize("word", [12, -1])
def test_a_target_that_no_rank_has_is_an_error(word: int) -> None:
    with pytest.raises(RankFailedError, match=f"the target id {word} is not in the vocabulary"):
        World(2).run(wrong, word)


@pytest.mark.full
@settings(max_examples=5)
@given(words=st.integers(2, 40), rows=st.integers(1, 12), keep=st.booleans(), seed=st.integers(0, 99))
def test_any_vocabulary_in_any_chunks(words: int, rows: int, keep: bool, seed: int) -> None:
    for found in World(3).run(computed, words, seed, {"rows": rows, "keep": keep}):
        assert_is_that_of_all_words(found, words, seed)

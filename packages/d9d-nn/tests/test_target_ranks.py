"""Ranks of targets, counted chunk by chunk with the loss."""

from __future__ import annotations

import pytest
import torch
from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_nn.ops.linear_cross_entropy import (
    IGNORE,
    linear_cross_entropy,
    linear_cross_entropy_with_ranks,
    target_ranks,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.smoke

FEATURES, WORDS = 3, 11


def example(tokens: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Small whole numbers: products are exact, and many logits are equal."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randint(-2, 3, (tokens, FEATURES), generator=generator).float()
    weight = torch.randint(-2, 3, (WORDS, FEATURES), generator=generator).float()
    targets = torch.randint(WORDS, (tokens,), generator=generator)
    targets[::4] = IGNORE
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@settings(max_examples=25)
@given(st.integers(1, 30), st.integers(0, 2**20), st.integers(1, 40), st.booleans())
def test_ranks_are_those_of_full_logits(tokens: int, seed: int, rows: int, keep: bool) -> None:
    hidden, weight, targets = example(tokens, seed)
    logits = functional.linear(hidden, weight)
    own = logits.gather(1, targets.clamp(min=0).unsqueeze(1))
    expected = (logits > own).sum(1).masked_fill(targets == IGNORE, -1)
    _, ranks = linear_cross_entropy_with_ranks(hidden, weight, targets, rows=rows, keep=keep)
    assert torch.equal(ranks, expected)
    assert torch.equal(target_ranks(hidden, weight, targets, rows=rows), expected)
    for top in (1, 5):  # the target is among the k best exactly if its logit is at least the k-th largest one
        best = logits.topk(top).values[:, -1:]
        assert torch.equal(((ranks < top) & (ranks >= 0)), (own >= best).squeeze(1) & (targets != IGNORE))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("autocast", [True, False])
def test_the_loss_and_its_gradients_keep_their_bits(keep: bool, autocast: bool) -> None:
    found = []
    for op in (linear_cross_entropy, lambda *a, **k: linear_cross_entropy_with_ranks(*a, **k)[0]):
        hidden, weight, targets = example(13, 0)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = op(hidden * 0.37, weight, targets, rows=5, keep=keep)
        (loss * torch.linspace(-1, 2, 13)).sum().backward()
        found.append((loss, hidden.grad, weight.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


def test_shapes_are_those_of_the_targets() -> None:
    hidden, weight, targets = example(12, 1)
    loss, ranks = linear_cross_entropy_with_ranks(hidden.view(3, 4, FEATURES), weight, targets.view(3, 4))
    assert loss.shape == ranks.shape == (3, 4)
    assert ranks.dtype == torch.int64
    assert not ranks.requires_grad


def test_a_target_whose_logit_is_nan_is_no_hit() -> None:
    hidden, weight, _ = example(2, 1)
    hidden = hidden.detach().clone()
    hidden[0] = torch.nan
    ranks = target_ranks(hidden, weight, torch.tensor([3, 3]))
    assert ranks[0] == WORDS
    assert 0 <= ranks[1] < WORDS


def test_a_head_computes_ranks_only_where_they_are_read() -> None:
    head = CausalLMHead(FEATURES, WORDS, std=1.0)
    hidden, _, targets = example(6, 2)
    given = hidden.view(2, 3, FEATURES), targets.view(2, 3)
    assert list(head.on_demand()) == ["token_ranks"]
    assert head.train()(*given).keys() == {"token_loss"}
    head.observe("token_ranks", "evaluation")
    assert head.train()(*given).keys() == {"token_loss"}
    assert head.eval()(*given).keys() == {"token_loss", "token_ranks"}
    head.observe("token_ranks", "training")
    assert head.train()(*given).keys() == {"token_loss", "token_ranks"}
    assert head(given[0]).keys() == {"logits"}


def test_ranks_are_counted_beside_a_backend_that_has_none() -> None:
    head = CausalLMHead(FEATURES, WORDS, std=1.0)
    head.observe("token_ranks", "training")
    hidden, _, targets = example(6, 2)
    expected = head(hidden, targets)
    head.linear_cross_entropy.bind("theirs", linear_cross_entropy)
    found = head(hidden, targets)
    assert torch.equal(found["token_ranks"], expected["token_ranks"])
    assert torch.equal(found["token_loss"], expected["token_loss"])


class TheirsWithRanks:
    """Backend that counts ranks itself."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        self.calls.append("loss")
        return linear_cross_entropy(hidden, weight, targets)

    def with_ranks(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        self.calls.append("loss and ranks")
        return linear_cross_entropy_with_ranks(hidden, weight, targets)


def test_a_backend_that_counts_ranks_is_asked_for_them_and_computes_the_loss_once() -> None:
    head, theirs = CausalLMHead(FEATURES, WORDS, std=1.0), TheirsWithRanks()
    head.observe("token_ranks", "training")
    hidden, _, targets = example(6, 2)
    expected = head(hidden, targets)
    head.linear_cross_entropy.bind("theirs", theirs)
    found = head(hidden, targets)
    head.eval()(hidden, targets)
    assert theirs.calls == ["loss and ranks", "loss"]
    assert all(torch.equal(found[name], expected[name]) for name in ("token_loss", "token_ranks"))

"""Soft caps of attention scores and of logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from d9d_core.errors import BuildError
from d9d_core.model import VocabularyShare
from d9d_nn.attention.core import AttentionCore
from d9d_nn.heads.causal_lm import CausalLMHead
from d9d_nn.ops import vocabulary_parallel
from d9d_nn.ops.attention.reference import attention
from d9d_nn.ops.attention.slot import AttentionSlot
from d9d_nn.ops.linear_cross_entropy import IGNORE, linear_cross_entropy, linear_cross_entropy_with_ranks
from d9d_nn.ops.vocabulary_parallel import VocabularyParallelCrossEntropy, VocabularyParallelSlot
from torch import Tensor
from torch.nn import functional

CAP = 2.0


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, a weight with large logits, and targets, one of which is not predicted."""
    draws = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 4, generator=draws, dtype=dtype) for size in (6, 9))
    targets = torch.randint(9, (6,), generator=draws)
    targets[2] = IGNORE
    return hidden.requires_grad_(), (2 * weight).requires_grad_(), targets


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = CAP * torch.tanh(functional.linear(hidden, weight) / CAP)
    return functional.cross_entropy(logits, targets, reduction="none", ignore_index=IGNORE)


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("rows", [2, 100])
def test_the_loss_of_capped_logits_and_its_gradients_are_the_definition(rows: int, keep: bool) -> None:
    hidden, weight, targets = drawn()
    expected = plain(hidden, weight, targets)
    found = linear_cross_entropy(hidden, weight, targets, rows=rows, keep=keep, softcap=CAP)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad((expected * torch.arange(6)).sum(), (hidden, weight))
    got = torch.autograd.grad((found * torch.arange(6)).sum(), (hidden, weight))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b)
    loss, ranks = linear_cross_entropy_with_ranks(hidden, weight, targets, rows=rows, keep=keep, softcap=CAP)
    assert torch.equal(loss, found)
    assert torch.equal(ranks, linear_cross_entropy_with_ranks(hidden, weight, targets)[1])  # a cap keeps the order


@pytest.mark.parametrize("keep", [True, False])
def test_a_share_of_the_words_has_the_same_loss(keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary_parallel.dist, "all_reduce", lambda *_, **__: None)
    hidden, weight, targets = drawn()
    loss: Any = VocabularyParallelCrossEntropy(0, None, CAP)  # type: ignore[arg-type] # one rank has all words
    found, expected = loss(hidden, weight, targets, rows=4, keep=keep), plain(hidden, weight, targets)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected.sum(), (hidden, weight))
    for a, b in zip(torch.autograd.grad(found.sum(), (hidden, weight)), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_a_head_caps_logits_too_and_no_backend_can_ignore_the_cap() -> None:
    hidden, weight, targets = drawn(torch.float32)
    head = CausalLMHead(4, 9, std=0.02, softcap=CAP)
    with torch.no_grad():
        assert head.weight is not None
        head.weight.copy_(weight)
    logits = head(hidden)["logits"]
    torch.testing.assert_close(logits, CAP * torch.tanh(functional.linear(hidden, weight) / CAP))
    torch.autograd.grad(logits.sum(), head.weight)
    torch.testing.assert_close(head(hidden, targets)["token_loss"], plain(hidden, weight, targets))
    head.observe("token_ranks", "training")
    torch.testing.assert_close(head(hidden, targets)["token_loss"], plain(hidden, weight, targets))
    assert head.linear_cross_entropy.op == "capped_linear_cross_entropy"
    assert CausalLMHead(4, 9, std=0.02).linear_cross_entropy.op == "linear_cross_entropy"
    share = VocabularyShare(0, 9, None)
    head.split_vocabulary(share)
    assert head.linear_cross_entropy.op == "capped_vocabulary_parallel_cross_entropy"
    assert head.linear_cross_entropy.function.softcap == CAP  # type: ignore[attr-defined]
    assert VocabularyParallelSlot(share).op == "vocabulary_parallel_cross_entropy"


@pytest.mark.parametrize("window", [None, 3])
def test_capped_scores_are_the_definition(window: int | None) -> None:
    draws = torch.Generator().manual_seed(0)
    query, key, value = (3 * torch.randn(2, 8, heads, 4, generator=draws) for heads in (4, 2, 2))
    slot = AttentionSlot(query_heads=4, key_value_heads=2, head_dim=4, window=window, softcap=CAP)
    assert slot.op == "capped_attention"
    key4, value4 = (tensor.repeat_interleave(2, dim=2) for tensor in (key, value))
    scores = CAP * torch.tanh(torch.einsum("bsnd,btnd->bnst", query, key4) / math.sqrt(4) / CAP)
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    seen = seen if window is None else seen.triu(1 - window)
    expected = torch.einsum("bnst,btnd->bsnd", scores.masked_fill(~seen, -math.inf).softmax(-1), value4)
    torch.testing.assert_close(slot(query, key, value, slot.prepare(None, 8, torch.device("cpu"))), expected)
    assert not torch.allclose(attention(query, key, value, window=window), expected, atol=0.1)


def test_a_method_that_would_ignore_the_cap_is_refused() -> None:
    core = AttentionCore(query_heads=2, key_value_heads=2, head_dim=4, softcap=CAP)
    with pytest.raises(BuildError, match="soft cap of attention scores.* use method ulysses"):
        core.attend_by(lambda *_: torch.zeros(1))

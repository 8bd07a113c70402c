"""The output projection and loss on a GPU, where products add up in a wider format than their operands'."""

from __future__ import annotations

import pytest
import torch
from d9d_nn.ops.linear_cross_entropy import linear_cross_entropy
from torch.nn import functional

pytestmark = pytest.mark.gpu

TOKENS, FEATURES, WORDS = 96, 64, 1000


@pytest.mark.parametrize("keep", [False, True])
def test_bfloat16_gradients_are_those_of_float64_rounded_once(keep: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(TOKENS, FEATURES, device="cuda", generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(WORDS, FEATURES, device="cuda", generator=generator) / 8).bfloat16().requires_grad_()
    targets = torch.randint(WORDS, (TOKENS,), device="cuda", generator=generator)
    targets[::7] = -100
    loss = linear_cross_entropy(hidden, weight, targets, rows=20, keep=keep)
    loss.sum().backward()
    exact_hidden, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    expected = functional.cross_entropy(exact_hidden @ exact_weight.T, targets, reduction="none", ignore_index=-100)
    expected.sum().backward()
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2, atol=2e-2)
    for found, exact in ((hidden, exact_hidden), (weight, exact_weight)):
        assert found.grad is not None
        assert exact.grad is not None
        cosine = functional.cosine_similarity(found.grad.double().flatten(), exact.grad.flatten(), dim=0)
        assert 1 - cosine < 2e-5
    assert not hidden.grad[::7].any() if hidden.grad is not None else False


def test_many_chunks_of_bfloat16_add_up_in_float32() -> None:
    """Each chunk alone is below half a unit in the last place of the sum."""
    hidden = torch.ones(4096, 8, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(16, 8, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.zeros(4096, dtype=torch.int64, device="cuda"), rows=4).sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad[1], torch.full_like(weight.grad[1], 4096 / 16))

"""Chunks of tokens of the loss, and the products and gradients around them."""

from __future__ import annotations

import pytest
import torch
from d9d_nn.ops.linear_cross_entropy import IGNORE
from d9d_triton.linear_cross_entropy import narrow, parts
from d9d_triton.linear_cross_entropy.operators import scaled_gradients
from d9d_triton.linear_cross_entropy.parts import parts_of
from d9d_triton.linear_cross_entropy.passes import columns


@pytest.mark.parametrize(
    ("tokens", "kept", "rows", "expected"),
    [
        (10, 0, 100, [(0, 10)]),
        (10, 10, 100, [(0, 10)]),
        (0, 0, 100, []),
        (300, 0, 256, [(0, 192), (192, 300)]),  # 150 each, rounded up to tiles of 64
        (300, 100, 256, [(0, 100), (100, 300)]),
        (300, 44, 100, [(0, 44), (44, 144), (144, 244), (244, 300)]),  # no more than 100, though 86 in tiles are 128
        (256, 0, 64, [(0, 64), (64, 128), (128, 192), (192, 256)]),
    ],
)
def test_chunks_are_even_and_whole_tiles(tokens: int, kept: int, rows: int, expected: list[tuple[int, int]]) -> None:
    memory = torch.zeros(kept, 16)
    found = parts_of(tokens, memory, rows)
    assert [(part.start, part.stop) for part, _ in found] == expected
    assert [space.shape for _, space in found] == [(stop - start, 16) for start, stop in expected]
    others = found[1:] if kept else found
    assert len({space.data_ptr() for _, space in others}) <= 1  # one buffer
    if kept:
        assert found[0][1] is memory


def test_a_row_in_memory_is_a_multiple_of_16_columns() -> None:
    assert [columns(words) for words in (1, 16, 17)] == [16, 16, 32]
    assert parts.space_for(3, torch.zeros(1, 2), torch.zeros(17, 2)).shape == (3, 32)


def test_ignored_tokens_are_zeros_for_the_gradient_of_the_weight_alone() -> None:
    hidden, targets = torch.full((2, 2, 1), torch.nan), torch.tensor([[1, -100], [-100, -100]])
    hidden[0, 0] = 3.0
    assert parts.without_ignored(hidden, targets, True).tolist() == [[3.0], [0.0], [0.0], [0.0]]
    assert parts.without_ignored(hidden, targets, False) is hidden


def test_what_is_not_needed_is_empty() -> None:
    like = torch.zeros(2, 3, dtype=torch.bfloat16)
    assert parts.empty(like, torch.float32, True).shape == (2, 3)
    assert parts.empty(like, torch.float32, False).numel() == 0
    assert parts.total_of(like, like, False) is like
    assert parts.total_of(None, torch.ones(2, 3), True).tolist() == [[0.0] * 3] * 2
    assert parts.total_of(None, like, False).numel() == 0
    assert parts.only((True, False), (like, like)) == (like, None)
    targets = torch.zeros(2, 3, dtype=torch.int64)
    for ranked, shape in ((True, (2, 3)), (False, (0,))):
        losses, ranks, statistics = parts.results(like, targets, ranked)
        assert (losses.shape, ranks.shape, statistics.shape) == ((2, 3), shape, (2, 6))
        assert (losses.dtype, ranks.dtype) == (torch.float32, torch.int64)


def test_products_add_up_in_the_dtype_of_the_sum() -> None:
    a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [4.0]])
    for dtype in (torch.float32, torch.bfloat16):
        first = parts.add_product(None, a.to(dtype), b.to(dtype), torch.float32)
        assert (first.item(), first.dtype) == (11.0, torch.float32)
        total = torch.full((1, 1), 5.0)
        assert parts.add_product(total, a.to(dtype), b.to(dtype), torch.float32) is total
        assert total.item() == 16.0


def test_a_loss_of_an_ignored_token_does_not_reach_its_hidden_state() -> None:
    targets, hidden, weight = torch.tensor([1, IGNORE]), torch.tensor([[2.0], [0.0]]), torch.tensor([[4.0]])
    narrow.scale(torch.tensor([0.5, torch.inf]), targets, hidden, weight)
    assert hidden.tolist() == [[1.0], [0.0]]
    assert weight.tolist() == [[2.0]]


def test_a_gradient_of_a_sum_is_known_as_one_number() -> None:
    one = torch.ones(())
    assert parts.is_one_number(one)
    assert parts.is_one_number(one.expand(3, 4))
    assert parts.is_one_number(torch.ones(1, 1))
    assert not parts.is_one_number(torch.ones(2))
    assert not parts.is_one_number(torch.ones(3, 1).expand(3, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_ahead_are_multiplied_by_the_gradient_of_the_losses(dtype: torch.dtype) -> None:
    targets = torch.tensor([[2, IGNORE, 0]])
    of_hidden, of_weight = torch.tensor([[[1.0], [5.0], [3.0]]]), torch.tensor([[7.0], [0.0]])
    found = scaled_gradients(torch.full((1, 3), 0.5), targets, of_hidden, of_weight, dtype)
    assert [gradient.dtype for gradient in found] == [dtype, dtype]
    assert [gradient.flatten().tolist() for gradient in found] == [[0.5, 0.0, 1.5], [3.5, 0.0]]
    nothing = torch.zeros(1, 0)
    found = scaled_gradients(nothing, targets[:, :0], torch.zeros(1, 0, 1), torch.zeros(2, 1), dtype)
    assert [gradient.tolist() for gradient in found] == [[[]], [[0.0], [0.0]]]  # without tokens, no NaN
    found = scaled_gradients(torch.ones(1, 3), targets, of_hidden[:0], of_weight[:0], dtype)
    assert [gradient.numel() for gradient in found] == [0, 0]  # not needed

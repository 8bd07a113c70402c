"""Attention computed in the turns of a ring equals attention over all positions, as do its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention


@pytest.mark.parametrize("window", [None, 3])
def test_turns_add_up_to_attention_over_all_positions(window: int | None) -> None:
    pytest.importorskip("d9d_parallel")
    from d9d_testing.suites.support.attention_blocks import attend_in_turns, block_slot

    generator = torch.Generator().manual_seed(0)
    inputs: list[Any] = [torch.randn(2, 8, heads, 4, generator=generator, dtype=torch.float64) for heads in (2, 1, 1)]
    for tensor in inputs:
        tensor.requires_grad_()
    slot = block_slot({"causal": True, "query_heads": 2, "key_value_heads": 1, "head_dim": 4, "window": window})
    out = attend_in_turns(slot, *inputs, None)
    back = torch.arange(8)[:, None] - torch.arange(8)
    seen = (back >= 0) & (back < (window or 8))
    query, key, value = (tensor.transpose(1, 2) for tensor in inputs)
    expected = scaled_dot_product_attention(query, key, value, seen, enable_gqa=True).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    grad = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    for found, right in zip(
        torch.autograd.grad(out, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True
    ):
        torch.testing.assert_close(found, right)

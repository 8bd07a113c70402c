"""Shards of tensors: which of them share memory."""

from __future__ import annotations

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_weights.sharding.shards import check_memory, describe
from torch import Tensor

FULL = torch.zeros(4, 6)


@pytest.mark.parametrize(
    ("first", "second"),
    [(FULL, FULL[3, 5:]), (FULL.T, FULL[3, 5:]), (FULL[:3], FULL[2:]), (FULL[0].expand(2, 6), FULL[0, 5])],
    ids=["last number", "transposed", "a row", "expanded"],
)
def test_a_tensor_under_two_names_is_refused_however_little_of_it_is_shared(first: Tensor, second: Tensor) -> None:
    with pytest.raises(CheckpointError, match="tensors '(a' and 'b|b' and 'a)' share memory"):
        check_memory(describe({"a": first, "b": second}))


def test_neighbours_in_memory_share_none() -> None:
    check_memory(describe({"a": FULL[:2], "b": FULL[2], "c": FULL[3], "d": FULL[:0]}))

"""Positions of samples over ranks of ``cp``: every position once, in an order that gives all ranks the same work."""

from __future__ import annotations

import pytest
import torch
from d9d_engine.distributed.positions import ZigzagPositions
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.smoke


@given(ranks=st.integers(1, 6), chunk=st.integers(1, 3), samples=st.integers(1, 3))
def test_parts_of_all_ranks_join_to_the_whole_in_order(ranks: int, chunk: int, samples: int) -> None:
    whole = torch.arange(samples * 2 * ranks * chunk * 5).view(samples, 2 * ranks * chunk, 5)
    parts = torch.stack([ZigzagPositions(ranks, rank).own(whole) for rank in range(ranks)])
    assert torch.equal(ZigzagPositions.joined(parts), whole)
    assert torch.equal(ZigzagPositions.parted(whole, ranks), parts)


@given(ranks=st.integers(1, 6), chunk=st.integers(1, 3))
def test_all_ranks_see_equally_many_earlier_positions_but_for_chunks_of_their_own(ranks: int, chunk: int) -> None:
    places = torch.arange(2 * ranks * chunk).unsqueeze(0)
    work = {int((ZigzagPositions(ranks, rank).own(places) // chunk).sum()) for rank in range(ranks)}
    assert len(work) == 1


def test_neighbours_that_join_their_parts_are_in_zigzag_order_of_longer_chunks() -> None:
    places = torch.arange(32).unsqueeze(0)
    parts = [ZigzagPositions(4, rank).own(places) for rank in range(4)]
    for pair in range(2):
        joined = ZigzagPositions.joined(torch.stack(parts[2 * pair : 2 * pair + 2]))
        assert torch.equal(joined, ZigzagPositions(2, pair).own(places))


def test_positions_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mesh.cp is 2.*2 x 2 does not divide the 6 positions.*multiple of 4"):
        ZigzagPositions(2, 0).own(torch.zeros(1, 6))

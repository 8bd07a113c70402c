"""Pieces of data pipelines that can be used alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from d9d_core.data import DataContext
from d9d_data.library.bucketing import BufferSortedDataset
from d9d_data.library.packing import FixedCountPacker
from d9d_data.library.padding import pad_stack
from d9d_data.library.pooling import pooling_mask
from d9d_data.library.sharding import ShardedDataset
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor
from torch.utils.data import DataLoader


@given(st.integers(0, 40), st.integers(1, 7), st.sampled_from(["sequential", "chunked"]))
def test_shards_make_up_the_dataset(size: int, total: int, mode: Literal["sequential", "chunked"]) -> None:
    items = list(range(size))
    shards = [list(ShardedDataset(items, total, current, mode)) for current in range(total)]
    assert sorted(item for shard in shards for item in shard) == items
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    expected = (
        [items[current::total] for current in range(total)]
        if mode == "sequential"
        else [shard for shard in shards if shard == list(range(shard[0], shard[0] + len(shard)) if shard else [])]
    )
    assert shards == expected
    equal = [ShardedDataset(items, total, current, mode, pad_to_equal_size=True) for current in range(total)]
    assert {len(shard) for shard in equal} == {-(-size // total)}
    for shard, padded in zip(shards, equal, strict=True):
        assert list(padded) == shard + [size - 1] * (len(padded) - len(shard))


def test_a_rank_gets_its_shard(tmp_path: Path) -> None:
    context = DataContext(seed=0, batch_size=4, microbatch_size=1, cache_dir=tmp_path, rank=1, ranks=2)
    assert list(ShardedDataset.of(range(5), context)) == [1, 3]
    with pytest.raises(ValueError, match="shard 2 of 2: shards are numbered from 0 to 1"):
        ShardedDataset(range(5), 2, 2)


class Sized:
    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, index: int) -> int:
        return self.sizes[index]

    def sort_key(self, index: int) -> float:
        return self.sizes[index]


@given(st.lists(st.integers(0, 20), max_size=50), st.integers(1, 4), st.integers(1, 4), st.integers(0, 3))
def test_packs_have_items_of_similar_size(sizes: list[int], pack: int, packs: int, seed: int) -> None:
    buffer = pack * packs
    found = list(BufferSortedDataset(Sized(sizes), buffer, pack, seed))
    for begin in range(0, len(sizes), buffer):
        window = sorted(sizes[begin : begin + buffer])
        expected = [window[first : first + pack] for first in range(0, len(window), pack)]
        own = found[begin : begin + buffer]
        assert sorted(own[first : first + pack] for first in range(0, len(own), pack)) == sorted(expected)
    assert list(BufferSortedDataset(Sized(sizes), buffer, pack, seed)) == found


def test_the_order_of_packs_depends_on_the_seed() -> None:
    orders = {tuple(BufferSortedDataset(Sized(list(range(64))), 64, 4, seed)) for seed in (0, 1, None)}
    assert len(orders) == 3
    assert tuple(range(64)) in orders  # without a seed
    assert tuple(BufferSortedDataset(Sized(list(range(64))), 64, 4)) == tuple(
        BufferSortedDataset(Sized(list(range(64))), 64, 4, seed=0)
    )
    with pytest.raises(ValueError, match="buffer_size 6 is not a positive multiple of pack_size 4"):
        BufferSortedDataset(Sized([1]), 6, 4)


@pytest.mark.parametrize("index", range(9))
def test_any_sorted_item_can_be_read_first(index: int) -> None:
    sizes = [5, 3, 4, 2, 9, 1, 8, 0, 7]
    whole = BufferSortedDataset(Sized(sizes), 4, 2, seed=None)
    assert list(whole) == [2, 3, 4, 5, 0, 1, 8, 9, 7]
    alone = BufferSortedDataset(Sized(sizes), 4, 2, seed=None)
    assert (alone[index], alone.sort_key(index)) == (whole[index], whole[index])
    assert alone.place_of(index) == sizes.index(whole[index])


def test_tensors_are_padded_on_either_side() -> None:
    items = [tensor([1, 2, 3]), tensor([4]), tensor([], dtype=torch.int64)]
    assert pad_stack(items, 9).tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert pad_stack(items, 0, "left", 2).tolist() == [[0, 1, 2, 3], [0, 0, 0, 4], [0, 0, 0, 0]]
    assert pad_stack([tensor([0.5])], -1.0, multiple=4).tolist() == [[0.5, -1, -1, -1]]
    wrong: list[tuple[list[Any], str]] = [
        ([], "no tensors"), ([torch.zeros(2, 2)], "shape"), ([tensor([1]), tensor([1.0])], "dtype")
    ]  # fmt: skip
    for given_items, message in wrong:
        with pytest.raises(ValueError, match=message):
            pad_stack(given_items, 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32])
def test_pooling_masks_find_tokens_on_either_side_of_padding(dtype: torch.dtype) -> None:
    mask = tensor([[0, 0, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]]).to(dtype)
    first = pooling_mask(mask, "first")
    assert first.dtype == dtype
    assert first.long().tolist() == [[0, 0, 1, 0, 0], [1, 0, 0, 0, 0], [0] * 5]
    assert pooling_mask(mask, "last").long().tolist() == [[0, 0, 0, 0, 1], [0, 1, 0, 0, 0], [0] * 5]
    assert torch.equal(pooling_mask(mask, "all"), mask)
    with pytest.raises(ValueError, match="use 'first', 'last' or 'all'"):
        pooling_mask(mask, "mean")  # type: ignore[arg-type]


def test_packs_have_a_fixed_number_of_microbatches() -> None:
    loader: DataLoader[int] = DataLoader(list(range(14)), batch_size=2)  # type: ignore[arg-type]
    packs = FixedCountPacker(loader, 3)
    assert len(packs) == len(list(packs)) == 2
    assert [len(pack) for pack in FixedCountPacker(loader, 3, drop_last=False)] == [3, 3, 1]
    assert len(FixedCountPacker(loader, 3, drop_last=False)) == 3
    assert torch.cat(next(iter(packs))).tolist() == list(range(6))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="generator has no length"):
        len(FixedCountPacker((m for m in loader), 3))

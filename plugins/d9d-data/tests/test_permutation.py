from __future__ import annotations

import numpy as np
import pytest
from d9d_data.order.permutation import Permutation
from hypothesis import given
from hypothesis import strategies as st


def order(size: int, key: str = "k") -> np.ndarray:
    return Permutation(size, key)(np.arange(size))


def test_every_small_size_is_a_bijection() -> None:
    for size in range(1, 130):
        assert sorted(order(size)) == list(range(size)), size


@given(st.integers(1, 20_000), st.text(max_size=5))
def test_any_size_and_key_is_a_bijection(size: int, key: str) -> None:
    values = order(size, key)
    assert values.min() == 0
    assert values.max() == size - 1
    assert len(np.unique(values)) == size


@given(st.integers(2, 2**62), st.data())
def test_huge_sizes_stay_in_range_without_collisions(size: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, size - 1))
    indices = np.arange(first, min(size, first + 50), dtype=np.int64)
    values = Permutation(size, "x")(indices)
    assert ((values >= 0) & (values < size)).all()
    assert len(np.unique(values)) == len(indices)


@given(st.integers(1, 1000), st.data())
def test_any_place_can_be_read_alone(size: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, size - 1))
    permutation = Permutation(size, "k")
    assert permutation(np.asarray([[index]]))[0, 0] == order(size)[index]


def test_order_is_pinned_across_machines_and_versions() -> None:
    assert order(10, "seed 0 epoch 0").tolist() == [5, 7, 6, 0, 4, 2, 1, 3, 9, 8]


def test_keys_give_unrelated_well_mixed_orders() -> None:
    one, other = order(4096, "a"), order(4096, "b")
    assert abs(np.corrcoef(one, np.arange(4096))[0, 1]) < 0.06
    assert abs(np.corrcoef(one, other)[0, 1]) < 0.06
    # About one item of a random permutation keeps its place, and about one pair of neighbours stays together.
    assert np.count_nonzero(one == np.arange(4096)) < 8
    assert np.count_nonzero(np.diff(one) == 1) < 8


@pytest.mark.parametrize("index", [-1, 5])
def test_index_outside_is_an_error(index: int) -> None:
    with pytest.raises(IndexError):
        Permutation(5, "k")(np.asarray([index]))


def test_the_largest_permutation_has_its_first_and_last_item() -> None:
    size = 2**62
    first, last = Permutation(size, "k")(np.asarray([0, size - 1])).tolist()
    assert 0 <= min(first, last) < max(first, last) < size

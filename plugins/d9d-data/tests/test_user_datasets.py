"""Users' datasets, exactly: packs of similar size, collation, and iterables with saved places."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.dataset.config import DatasetConfig
from d9d_data.dataset.items import Items, _array, _is_iterable, _length
from d9d_data.dataset.iterable import IterablePacks, IterableStream
from d9d_data.dataset.stream import DatasetPacks, _check_sizes, _check_window, _described, _facts_of
from d9d_data.order.layout import Layout
from d9d_data.order.permutation import Permutation
from d9d_data.order.samples import SampleOrder

CONTEXT = DataContext(3, 4, 2, Path("absent"))


def items_of(sizes: list[float], **config: Any) -> Any:
    given = {"build": "m:f", "padding": {}, "bucket_window": None, "side": "right", "pad_multiple": 1, **config}
    return SimpleNamespace(
        config=SimpleNamespace(**given), dataset=SimpleNamespace(),
        sizes=lambda indices: np.asarray([sizes[index] for index in indices]), collate=list,
        __len__=lambda: len(sizes),
    )  # fmt: skip


@pytest.mark.parametrize("shuffle", [False, True])
def test_packs_of_a_window_have_items_of_similar_size(shuffle: bool) -> None:
    items = items_of([9, 1, 8, 2, 7, 3, 6])
    order = SampleOrder(7, 5, shuffle)
    taken = order.take(0, 21).tolist()

    def expected(first: int, count: int, window: int, epoch: int) -> list[list[int]]:
        some = sorted(taken[first : first + count], key=lambda index: items.sizes([index])[0])
        packs = [some[place : place + 2] for place in range(0, count, 2)]
        if not shuffle:
            return packs
        key = f"seed 5 packs of window {window} of epoch {epoch}"
        return [packs[place] for place in Permutation(len(packs), key)(np.arange(len(packs))).tolist()]

    packs = DatasetPacks(items, order, Layout(2, 2, 0, 1), 4)
    found = [packs.pack_at(2 * number)[0] for number in range(7)]
    crossing = sorted(taken[6:8], key=lambda index: items.sizes([index])[0])
    assert found == [
        *expected(0, 4, 0, 0), *expected(4, 2, 1, 0), crossing, *expected(8, 4, 0, 1), *expected(12, 2, 1, 1),
    ]  # fmt: skip


def test_items_are_dealt_to_ranks_in_runs_or_in_order_of_size() -> None:
    items = items_of([8, 7, 6, 5, 4, 3, 2, 1])
    order = SampleOrder(8, 0, shuffle=False)
    plain = [DatasetPacks(items, order, Layout(8, 2, rank, 2), None).pack_at(0) for rank in range(2)]
    assert plain == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    dealt = [DatasetPacks(items, order, Layout(8, 2, rank, 2), 8).pack_at(8) for rank in range(2)]
    assert dealt == [[[7, 5], [3, 1]], [[6, 4], [2, 0]]]


@pytest.mark.parametrize(
    ("window", "batch", "count", "says"),
    [
        (None, 99, 4, None), (4, 2, 4, None), (4, 4, 4, None),
        (5, 4, 8, "data.bucket_window: 5 samples cannot be cut into batches of 4; use 4 or 8"),
        (3, 4, 8, "data.bucket_window: 3 samples cannot be cut into batches of 4; use 4"),
        (10, 5, 4, "batch.size: a batch of 5 samples is larger than the 4 items; lower batch.size"),
    ],
)  # fmt: skip
def test_windows_of_items_are_whole_batches(window: int | None, batch: int, count: int, says: str | None) -> None:
    class Sized(SimpleNamespace):
        def __len__(self) -> int:
            return count

    config: Any = SimpleNamespace(bucket_window=window, padding={"x": 0})
    items: Any = Sized(dataset=SimpleNamespace())
    if says is None:
        _check_window(config, items, batch)
    else:
        with pytest.raises(DataError) as caught:
            _check_window(config, items, batch)
        assert str(caught.value) == says


def test_sizes_of_items_are_known_by_a_method_or_a_padded_field() -> None:
    none, own = (SimpleNamespace(dataset=SimpleNamespace(**more)) for more in ({}, {"sort_key": len}))
    for window, padding, items, known in (
        (None, {}, none, True), (4, {"x": 0}, none, True), (4, {}, own, True), (4, {}, none, False),
    ):  # fmt: skip
        config: Any = SimpleNamespace(bucket_window=window, padding=padding)
        given: Any = items
        if known:
            _check_sizes(config, given)
        else:
            with pytest.raises(DataError, match=r"^data.bucket_window: the size of items is unknown; give the dataset"):
                _check_sizes(config, given)


def test_a_dataset_is_described_by_its_functions_and_its_fingerprint() -> None:
    class Sized(SimpleNamespace):
        def __len__(self) -> int:
            return 3

    def described(collate: str | None = None, **own: Any) -> tuple[str, dict[str, Any]]:
        config = SimpleNamespace(build="m:f", arguments={"a": 1}, collate=collate)
        items: Any = Sized(config=config, dataset=SimpleNamespace(**own))
        return _described(items), _facts_of(items)

    assert described() == ('["m:f", {"a": 1}, null]', {"samples": 3, "dataset": "m:f"})
    assert described("m:c", fingerprint="x")[0] == '["m:f", {"a": 1}, "x", "m:c"]'
    assert described(fingerprint=7)[0] == '["m:f", {"a": 1}, null]'
    assert described(facts={"samples": 9, "more": 1})[1] == {"samples": 9, "dataset": "m:f", "more": 1}
    assert described(facts=[1])[1] == {"samples": 3, "dataset": "m:f"}


def made(dataset: Any, **config: Any) -> Any:
    items = Items.__new__(Items)
    given = {"build": "m:f", "collate": None, "padding": {}, "side": "right", "pad_multiple": 1, **config}
    items.config, items.dataset, items._own_collate = SimpleNamespace(**given), dataset, config.get("own")  # type: ignore[assignment]
    return items


def test_sizes_of_items_are_numbers() -> None:
    keyed = made(SimpleNamespace(sort_key=lambda index: index * 2))
    assert keyed.sizes([3, 1]).tolist() == [6.0, 2.0]
    with pytest.raises(DataError, match="^data.build: sort_key of the dataset of m:f does not return numbers: "):
        made(SimpleNamespace(sort_key=lambda index: "x")).sizes([0])
    with pytest.raises(DataError, match=r"^data.build: sort_key\(4\) of m:f raised ZeroDivisionError: "):
        made(SimpleNamespace(sort_key=lambda index: 1 / 0)).sizes([4])
    padded = made([{"x": [1, 2, 3], "y": [1]}, {"x": [1], "y": [1]}], padding={"x": 0})
    assert padded.sizes([0, 1]).tolist() == [3.0, 1.0]


def test_items_are_collated_with_padding_and_their_lengths() -> None:
    rows = [{"x": [1, 2, 3], "y": 1.5}, {"x": [4], "y": 2.0}]
    batch = made(rows, padding={"x": -1}, pad_multiple=2).collate([1, 0])
    assert {name: values.tolist() for name, values in batch.items()} == {
        "x": [[4, -1, -1, -1], [1, 2, 3, -1]], "y": [2.0, 1.5], "lengths": [1, 3],
    }  # fmt: skip
    left = made(rows, padding={"x": -1}, side="left").collate([0, 1])
    assert (left["x"].tolist(), "lengths" in left) == ([[1, 2, 3], [-1, -1, 4]], False)
    own = made([{"x": [1], "lengths": 7}], padding={"x": 0}).collate([0])
    assert own["lengths"].tolist() == [7]
    for wrong, why in (
        ([{"x": [1]}, {"y": [1]}], "^data.build: item 1 of m:f has the fields y, item 0 has x; give all items the"),
        ([{"x": [1]}, [1]], "^data.build: item 1 of m:f is a list; return a mapping"),
        ([{"x": [1]}, {}], "^data.build: item 1 of m:f is an empty mapping; return one"),
        ([{"x": [1]}, {"x": [1, 2]}], r"^data.padding: field 'x' has shape \[1\] in item 0 of m:f and \[2\] in item 1; "
                                      r"set its padding value, such as 'padding: \{x: 0\}'$"),
        ([{"x": [[1]]}, {"x": [[1, 2]]}], "return equal shapes, since only one-dimensional fields can be padded$"),
        ([{"x": [1]}], "^data.build: item 1 of m:f raised IndexError: list index out of range$"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=why):
            made(wrong).collate([0, 1])


def test_collated_batches_of_users_have_a_row_for_each_item() -> None:
    def collated(value: Any) -> Any:
        return made([1, 2], collate="m:c", own=lambda items: value).collate([0, 1])

    assert collated({"x": [[1], [2]], 3: [1.5, 2]})["3"].tolist() == [1.5, 2.0]
    for value, why in (
        ({}, "^data.collate: m:c returned an empty mapping; return a mapping"), ([1], "returned a list; return"),
        ({"x": 3}, r"^data.collate: m:c: field 'x' has shape \[\] for 2 items; the first dimension is"),
        ({"x": [1]}, r"field 'x' has shape \[1\] for 2 items"),
        ({"x": "a"}, "^data.collate: m:c: field 'x' is a str of <U1, not of numbers; omit the field"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=why):
            collated(value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        ([1, 2], "int64"), ([], "int64"), ([1.5], "float32"), ([True], "bool"), (3, "int64"), (2.5, "float32"),
        (np.asarray([1], dtype=np.int8), "int8"), (np.float64(2.5), "float64"), ([[1], [2]], "int64"),
        ([2**63], "int64"),
    ],
)  # fmt: skip
def test_lists_have_wide_numbers_and_arrays_keep_theirs(value: Any, dtype: str) -> None:
    assert str(_array(value, "w").dtype) == dtype
    with pytest.raises(DataError, match="^w is not an array: .*; give nested lists of equal lengths$"):
        _array([[1], [2, 3]], "w")


def test_datasets_have_items_by_index_or_an_iterator() -> None:
    class Indexed(list[int]):
        pass

    class Once:
        def __iter__(self) -> Any:
            return iter(())

    class Half(Once):
        def __len__(self) -> int:
            return 1

    assert [_is_iterable(one) for one in (Indexed(), Once(), Half(), object())] == [False, True, True, False]
    config: Any = SimpleNamespace(build="m:f")
    assert _length(config, Indexed([1, 2])) == 2
    for dataset, why in (
        (Indexed(), "^data.build: the dataset of m:f has no items; correct it, or data.arguments$"),
        ({1: 2}, "^data.build: m:f returned a dict, not a dataset; return an object"),
        (object(), "^data.build: m:f returned an object, not"), (Half(), "returned a Half, not"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=why):
            _length(config, dataset)

    class Fails(Indexed):
        def __len__(self) -> int:
            raise KeyError("x")

    with pytest.raises(DataError, match=r"^data.build: len\(\) of the dataset of m:f fails: 'x'; correct its __len__"):
        _length(config, Fails())


class Epochs:
    """Iterable dataset of five items, which may skip some; all calls are recorded."""

    def __init__(self, counts: tuple[int, ...] = (5,)) -> None:
        self.calls: list[Any] = []
        self.counts = counts
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.calls.append(epoch)
        self.epoch = epoch

    def skip(self, count: int) -> Any:
        self.calls.append(f"skip {count}")
        return range(count, 5)

    def __iter__(self) -> Any:
        return iter(range(self.counts[min(self.epoch, len(self.counts) - 1)]))


def packs_of(dataset: Any, rank: int = 0) -> IterablePacks:
    items: Any = SimpleNamespace(
        dataset=dataset, config=SimpleNamespace(build="m:f"), asked=lambda read, what: read(),
        collate_raw=lambda taken, places: (taken, list(places)),
    )  # fmt: skip
    return IterablePacks(items, Layout(4, 1, rank, 2))


def test_an_iterable_dataset_is_read_epoch_after_epoch() -> None:
    packs = packs_of(dataset := Epochs(), rank=1)
    assert packs.pack_at(0) == [([2], [2]), ([3], [3])]
    assert packs.pack_at(4) == [([1], [6]), ([2], [7])]
    assert (packs.length, dataset.calls) == (5, [0, 1])
    assert packs.pack_at(0) == [([2], [2]), ([3], [3])]  # back
    assert dataset.calls == [0, 1, 0]
    packs.may_skip = True
    assert packs.pack_at(13) == [([0], [15]), ([1], [16])]
    assert dataset.calls == [0, 1, 0, 2, "skip 3", 3]
    far = packs_of(again := Epochs())
    # In a mixture that continues, the length of an epoch is found on the way.
    assert far.pack_at(12) == [([2], [12]), ([3], [13])]
    assert again.calls == [0, 1, 2, 3]
    assert packs_of(Epochs()).pack_at(10) == [([0], [10]), ([1], [11])]
    assert packs_of(Epochs()).pack_at(5) == [([0], [5]), ([1], [6])]


def test_an_iterable_dataset_is_read_again_only_to_go_back() -> None:
    packs = packs_of(dataset := Epochs((20,)))
    for consumed, calls in ((0, [0]), (4, [0]), (12, [0]), (12, [0, 0]), (8, [0, 0, 0]), (12, [0, 0, 0])):
        assert packs.pack_at(consumed) == [([place], [place]) for place in (consumed, consumed + 1)]
        assert dataset.calls == calls


def test_epochs_of_an_iterable_dataset_have_one_length_and_items() -> None:
    with pytest.raises(DataError, match=r"^data.build: epoch 1 of m:f has 3 items, but the first had 5; give all"):
        packs_of(Epochs((5, 3))).pack_at(8)
    with pytest.raises(DataError, match=r"^data.build: the dataset of m:f is empty$"):
        packs_of(Epochs((0,))).pack_at(0)
    with pytest.raises(DataError, match=r"^data.build: m:f returned an iterator, which can be read only once; return"):
        packs_of(iter([1, 2])).pack_at(0)


def test_the_place_in_an_iterable_dataset_is_saved_with_the_length_of_its_epochs() -> None:
    items: Any = SimpleNamespace(dataset=Epochs(), config=SimpleNamespace(build="m:f"), asked=lambda read, what: read())
    items.collate_raw = lambda taken, places: {"x": np.asarray(taken)}

    def opened(**fields: Any) -> IterableStream:
        given = {"build": "m:f", "shuffle": False, "bucket_window": None, "workers": 0, **fields}
        return IterableStream(SimpleNamespace(**given), CONTEXT, items, "i", {"a": 1})  # type: ignore[arg-type]

    stream = opened()
    state = stream.state()
    assert (state["epoch_items"], state["consumed"], stream.facts, "tokenisation" in state) == (
        None,
        0,
        {"a": 1},
        False,
    )
    stream.load_state({**state, "epoch_items": 5})
    assert (stream._packs.length, stream._packs.may_skip) == (5, True)
    for wrong in (0, -1, "5"):
        with pytest.raises(DataError, match=f"is damaged: epoch_items is {wrong!r}; use another checkpoint"):
            stream.load_state({**state, "epoch_items": wrong})
    stream.load_state({**state, "epoch_items": 1})
    for field, value in (("shuffle", True), ("bucket_window", 4), ("workers", 1)):
        with pytest.raises(DataError, match=f"^data.{field}: the iterable dataset of m:f "):
            opened(**{field: value})


def test_fields_to_pad_are_lists_of_the_first_item() -> None:
    made([{"x": [1]}], padding={"x": 0}).check_padding()
    with pytest.raises(DataError, match="^data.padding: items of m:f have no field 'xs'; did you mean 'x'"):
        made([{"x": [1]}], padding={"xs": 0}).check_padding()
    with pytest.raises(DataError, match=r"^data.padding: field 'x' of m:f has shape \[1, 1\], but only one-dim"):
        made([{"x": [[1]]}], padding={"x": 0}).check_padding()
    assert DatasetConfig(build="m:f", collate="m.n:g").collate == "m.n:g"

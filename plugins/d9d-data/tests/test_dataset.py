"""Datasets that a function of the user makes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.dataset.config import DatasetConfig
from d9d_data.dataset.items import Items
from d9d_data.dataset.stream import build_dataset
from d9d_testing.suites.dataset import DatasetSuite
from d9d_testing.suites.support.component import build_component

MODULE = '''
import numpy as np
import torch

class Counting(torch.utils.data.Dataset):
    """Item n counts to n, in as many tokens."""
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        tokens = torch.arange(index % 13 + 1) + 100 * index
        return {"tokens": tokens, "targets": tokens.tolist(), "label": index % 3, "weight": np.float64(0.5)}

class Sized(Counting):
    facts = {"vocab_size": 99}
    fingerprint = "a"
    def sort_key(self, index):
        return index % 13
    def save_assets(self, directory):
        (directory / "saved.txt").write_text("x")

class Endless:
    def __iter__(self):
        return iter([])

class Streamed(torch.utils.data.IterableDataset):
    """Items of Counting, in order."""
    def __init__(self, count):
        self.items = Counting(count)
        self.skipped = []
    def __iter__(self):
        return (self.items[index] for index in range(len(self.items)))

class Skipping(Streamed):
    def skip(self, count):
        self.skipped.append(count)
        return [self.items[index] for index in range(count, len(self.items))]

def streamed(count=40):
    return Streamed(count)

def skipping(count=12):
    return Skipping(count)

def once():
    return (item for item in [{"a": 1}])

class Failing:
    def __iter__(self):
        yield from ({"a": 1}, {"a": 2}, {"a": 3})
        raise OSError("gone")

def failing():
    return Failing()

class Shrinking:
    count = 3
    def set_epoch(self, epoch):
        self.count = 3 - epoch
    def __iter__(self):
        return iter([{"tokens": [1], "targets": [1]}] * self.count)

def shrinking():
    return Shrinking()

def constant_of():
    return 3

def first_tokens(items):
    assert isinstance(items, list)
    tokens = [item["tokens"] for item in items]
    return {"tokens": torch.stack([one[:1] for one in tokens]), "count": [len(one) for one in tokens]}

def raising_collate(items):
    raise ValueError("no")

def short(items):
    return {"a": [1]}

def counting(count=40, **others):
    return Counting(count)

def sized(count=40):
    return Sized(count)

def endless():
    return Endless()

def raising():
    raise FileNotFoundError("no such place")

def leaving():
    raise SystemExit(0)

def of(items):
    return items

def uneven():
    return [{"a": 1}, {"b": 1}]

def late():
    class Late(Counting):
        def __getitem__(self, index):
            if index == 7:
                raise KeyError("tokens")
            return super().__getitem__(index)
    return Late(8)

constant = 3
'''
PADDING = {"tokens": 0, "targets": -100}


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module").mkdir()
    (tmp_path / "module" / "items_of_the_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "module")


class OverItems(DatasetSuite):
    target = "dataset"
    other: ClassVar = {"arguments": {"count": 41}}
    workers = None

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {"build": "items_of_the_user:counting", "padding": PADDING}


class TestItems(OverItems):
    config: ClassVar = {"pad_multiple": 4}

    @pytest.mark.thorough
    def test_order_is_the_same_in_another_process(self, tmp_path: Path) -> None:
        """This takes 3 s, because the process imports torch."""
        super().test_order_is_the_same_in_another_process(tmp_path)


class TestItemsInBuckets(OverItems):
    config: ClassVar = {"bucket_window": 16}


class TestItemsOfKnownSizeInOrder(OverItems):
    config: ClassVar = {"bucket_window": 8, "shuffle": False, "side": "left", "build": "items_of_the_user:sized"}
    shuffled = False

    def sample(self, microbatch: Mapping[str, torch.Tensor], row: int) -> object:
        return int(microbatch["tokens"][row, -1])  # padding on the left is as wide as the microbatch needs

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {**super().fields(directory), "build": "items_of_the_user:sized"}


class TestIteratedItems(OverItems):
    config: ClassVar = {"shuffle": False, "build": "items_of_the_user:streamed"}
    shuffled = False

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {**super().fields(directory), "build": "items_of_the_user:streamed"}


class TestCollatedItems(OverItems):
    config: ClassVar = {"collate": "items_of_the_user:first_tokens"}

    def fields(self, directory: Path) -> Mapping[str, Any]:
        return {"build": "items_of_the_user:counting"}


@pytest.mark.full  # processes start slowly
def test_worker_processes_change_nothing(tmp_path: Path) -> None:
    suite = TestItemsInBuckets()
    suite.workers = "workers"  # type: ignore[misc, assignment]
    suite.test_worker_processes_change_nothing(tmp_path)


def opened(function: str = "counting", batch_size: int = 8, **fields: Any) -> Any:
    values = {"padding": PADDING, **fields}
    if "collate" in values:
        del values["padding"]
    config = DatasetConfig(build=f"items_of_the_user:{function}", **values)
    return build_dataset(config, DataContext(seed=0, batch_size=batch_size, microbatch_size=4, cache_dir=Path()))


def test_items_become_padded_microbatches() -> None:
    first, second = opened(shuffle=False, pad_multiple=4).next_pack()
    assert {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in second.items()} == {
        "tokens": ("torch.int64", [4, 8]), "targets": ("torch.int64", [4, 8]), "label": ("torch.int64", [4]),
        "weight": ("torch.float64", [4]), "lengths": ("torch.int64", [4]),
    }  # fmt: skip
    assert first["tokens"].tolist() == [[0, 0, 0, 0], [100, 101, 0, 0], [200, 201, 202, 0], [300, 301, 302, 303]]
    assert first["targets"][1].tolist() == [100, 101, -100, -100]
    assert second["lengths"].tolist() == [5, 6, 7, 8]
    assert "lengths" not in opened(side="left").next_pack()[0]


@pytest.mark.parametrize(("samples", "batch"), [(40, 8), (37, 8), (45, 4)])
def test_buckets_visit_every_item_once_an_epoch_in_packs_of_similar_length(samples: int, batch: int) -> None:
    window = batch * 3
    stream = opened("sized", batch, arguments={"count": samples}, bucket_window=window)
    taken: list[int] = []
    spreads = []
    for _ in range(3 * samples // batch):
        pack = [row // 100 for microbatch in stream.next_pack() for row in microbatch["tokens"][:, 0].tolist()]
        spreads.append(max(item % 13 for item in pack) - min(item % 13 for item in pack))
        taken += pack
    for epoch in range(len(taken) // samples):
        # A pack that spans the end of an epoch is sorted as a whole.
        seen = Counter(taken[: (epoch + 1) * samples + batch])
        assert all(seen[item] in (epoch + 1, epoch + 2) for item in range(samples))
    unsorted = opened("sized", batch, arguments={"count": samples})
    plain = []
    for _ in range(3 * samples // batch):
        pack = [int(n) for microbatch in unsorted.next_pack() for n in microbatch["lengths"]]
        plain.append(max(pack) - min(pack))
    assert sum(spreads) < sum(plain)


def test_the_sizes_of_a_window_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = opened("sized", 8, bucket_window=24)
    asked: list[int] = []
    known = Items.sizes

    def sizes(items: Items, indices: Sequence[int]) -> Any:
        asked.extend(indices)
        return known(items, indices)

    monkeypatch.setattr(Items, "sizes", sizes)
    for _ in range(5):
        stream.next_pack()
    assert sorted(asked) == list(range(40))


def test_the_dataset_may_know_more(tmp_path: Path) -> None:
    stream = opened("sized")
    assert stream.facts == {"samples": 40, "dataset": "items_of_the_user:sized", "vocab_size": 99}
    stream.save_assets(tmp_path)
    assert (tmp_path / "saved.txt").read_text() == "x"


@pytest.mark.thorough
def test_a_hugging_face_dataset_is_one() -> None:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"tokens": [[1, 2, 3], [4]], "label": [0, 1]})
    stream = opened("of", batch_size=4, arguments={"items": rows}, padding={"tokens": 0}, shuffle=False)
    (microbatch,) = stream.next_pack()
    assert microbatch["tokens"].tolist() == [[1, 2, 3], [4, 0, 0], [1, 2, 3], [4, 0, 0]]
    assert microbatch["label"].tolist() == [0, 1, 0, 1]
    whole = datasets.DatasetDict({"train": rows})
    with pytest.raises(DataError, match=r"returned a DatasetDict, not a dataset; .* one split of a Hugging"):
        opened("of", arguments={"items": whole})


@pytest.mark.parametrize(
    ("function", "fields", "message"),
    [
        ("absent", {}, r"items_of_the_user:absent cannot be imported: AttributeError: .*PYTHONPATH"),
        ("constant", {}, r"items_of_the_user:constant is an int, not a function"),
        ("raising", {}, r"items_of_the_user:raising raised FileNotFoundError with no arguments: no such place"),
        ("leaving", {}, r"items_of_the_user:leaving raised SystemExit"),
        ("sized", {"arguments": {"cuont": 3}}, r"raised TypeError with cuont: .*unexpected keyword argument 'cuont'"),
        ("constant_of", {}, r"returned an int, not a dataset; return an object with __len__.*, or with __iter__"),
        ("endless", {"shuffle": False}, r"the dataset of items_of_the_user:endless is empty"),
        (
            "endless",
            {},
            r"data.shuffle: the iterable dataset of .*:endless keeps its own order; write 'shuf",
        ),
        ("endless", {"shuffle": False, "bucket_window": 8}, r"data.bucket_window: .*no sizes by index; remove it"),
        ("endless", {"shuffle": False, "workers": 2}, r"data.workers: .*use 0, and workers inside the dataset"),
        ("once", {"shuffle": False}, r"items_of_the_user:once returned an iterator, which can be read only once"),
        ("failing", {"shuffle": False}, r"data.build: item 3 of items_of_the_user:failing raised OSError: gone"),
        ("shrinking", {"shuffle": False}, r"epoch 1 of items_of_the_user:shrinking has 2 items, but the first had 3"),
        (
            "sized",
            {"padding": {}, "collate": "items_of_the_user:raising_collate"},
            r"data.collate: items_of_the_user:raising_collate: items \d+ to \d+ raised ValueError: no",
        ),
        (
            "sized",
            {"padding": {}, "collate": "items_of_the_user:absent"},
            r"data.collate: .*:absent cannot be imported",
        ),
        ("sized", {"padding": {}, "collate": "items_of_the_user:constant"}, r"constant is an int, not a function"),
        (
            "sized",
            {"padding": {}, "collate": "builtins:len"},
            r"data.collate: builtins:len returned an int; return a map",
        ),
        (
            "sized",
            {"padding": {}, "collate": "items_of_the_user:short"},
            r"'a' has shape \[1\] for 4 items; the first dim",
        ),
        ("of", {"arguments": {"items": []}}, r"the dataset of items_of_the_user:of has no items"),
        ("of", {"arguments": {"items": [3]}}, r"item 0 of items_of_the_user:of is an int; return a mapping"),
        ("of", {"arguments": {"items": [{}]}}, r"item 0 of items_of_the_user:of is an empty mapping"),
        ("of", {"arguments": {"items": [{"text": "a"}]}}, r"item 0 .*: field 'text' is a str of <U1, not of numbers"),
        (
            "of",
            {"arguments": {"items": [{"a": [[1], [1, 2]]}]}},
            r"field 'a' is not an array: .*lists of equal lengths",
        ),
        ("sized", {"padding": {"token": 0}}, r"items of .*:sized have no field 'token'; did you mean 'tokens'\?"),
        ("sized", {"padding": {"label": 0}}, r"field 'label' of .* has shape \[\], but only one-dimensional fields"),
        (
            "uneven",
            {"padding": {}},
            r"item 1 of items_of_the_user:uneven has the fields b, item 0 has a; give all items the same",
        ),
        ("late", {}, r"item 7 of items_of_the_user:late raised KeyError: 'tokens'"),
        ("sized", {"padding": {}}, r"data.padding: field 'tokens' .*set its padding value, .*'padding: \{tokens: 0\}'"),
        ("sized", {"bucket_window": 12}, r"data.bucket_window: 12 samples cannot be .* batches of 8; use 8 or 16"),
        ("counting", {"padding": {}, "bucket_window": 8}, r"data.bucket_window: the size of items is unknown"),
        ("sized", {"arguments": {"count": 5}, "bucket_window": 8}, r"a batch of 8 samples is larger than the 5 items"),
    ],
)
def test_what_is_no_dataset_is_an_error_that_names_the_function(
    function: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        opened(function, **fields).next_pack()


def test_an_iterable_dataset_gives_the_same_items_in_order_again_and_again() -> None:
    mapped, iterated = opened(shuffle=False), opened("streamed", shuffle=False)
    for _ in range(12):
        for one, other in zip(mapped.next_pack(), iterated.next_pack(), strict=True):
            assert {name: one[name].tolist() for name in one} == {name: other[name].tolist() for name in other}
    assert "samples" not in iterated.facts


def test_an_iterable_dataset_is_resumed_at_its_position_and_skips_to_it_if_it_can() -> None:
    for packs, skipped in ((1, [8]), (2, [4]), (3, [])):  # 12 items, 8 of them in a pack
        whole, again = opened("skipping", shuffle=False), opened("skipping", shuffle=False)
        for _ in range(packs):
            whole.next_pack()
        again.load_state(whole.state())
        expected, found = whole.next_pack(), again.next_pack()
        assert [batch["tokens"].tolist() for batch in found] == [batch["tokens"].tolist() for batch in expected]
        assert again._items.dataset.skipped == skipped
    with pytest.raises(DataError, match="damaged: epoch_items is 0"):
        again.load_state({**whole.state(), "epoch_items": 0})


def test_ranks_share_the_items_of_an_iterable_dataset() -> None:
    (whole,) = (opened("streamed", shuffle=False),)
    config = DatasetConfig(build="items_of_the_user:streamed", padding=PADDING, shuffle=False)
    ranks = [build_dataset(config, DataContext(0, 8, 4, Path(), rank=rank, ranks=2)) for rank in range(2)]
    for _ in range(7):
        parts = [pack for rank in ranks for pack in rank.next_pack()]
        assert [one["label"].tolist() for one in parts] == [one["label"].tolist() for one in whole.next_pack()]


def test_a_function_of_the_user_collates_items() -> None:
    (first, _) = opened(shuffle=False, padding={}, collate="items_of_the_user:first_tokens").next_pack()
    assert (first["tokens"].tolist(), first["count"].tolist()) == ([[0], [100], [200], [300]], [1, 2, 3, 4])
    with pytest.raises(ValueError, match="padding has no effect with collate"):
        DatasetConfig(build="a:b", collate="a:c", padding=PADDING)
    with pytest.raises(ValueError, match="'c' does not name a function"):
        DatasetConfig(build="a:b", collate="c")


def test_items_can_be_mixed(tmp_path: Path) -> None:
    part = {"name": "dataset", "build": "items_of_the_user:counting", "padding": PADDING}
    context = DataContext(seed=0, batch_size=4, microbatch_size=4, cache_dir=tmp_path)

    def mixed(**other: Any) -> Any:
        parts = [{"data": part}, {"weight": 3, "data": {**part, "arguments": {"count": 3}, **other}}]
        return build_component("dataset", None, "mixture", {"parts": parts}, context)

    (microbatch,) = mixed().next_pack()
    inside = torch.arange(microbatch["tokens"].shape[1]) < microbatch["lengths"][:, None]
    assert (microbatch["targets"] == torch.where(inside, microbatch["tokens"], -100)).all()
    assert (microbatch["tokens"][:, 0] < 300).sum() >= 3
    with pytest.raises(DataError, match=r"data.parts\[1\].data.side: padding on the left cannot be mixed"):
        mixed(side="left")
    with pytest.raises(DataError, match=r"data.parts\[1\].data.padding: pads 'targets' with 5, another part with -100"):
        mixed(padding={"tokens": 0, "targets": 5})

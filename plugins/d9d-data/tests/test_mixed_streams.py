"""Mixtures and users' datasets, exactly: facts, orders, merged microbatches, one pass, and packs of similar size."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.config import DocumentsConfig, TextConfig
from d9d_data.dataset.config import DatasetConfig
from d9d_data.dataset.items import Items, _array, _is_iterable, _length
from d9d_data.dataset.iterable import IterablePacks, IterableStream
from d9d_data.dataset.stream import DatasetPacks, _check_sizes, _check_window, _described, _facts_of
from d9d_data.mixture import stream as mixed
from d9d_data.mixture.config import MixtureConfig, MixturePart
from d9d_data.mixture.merge import merge, with_lengths
from d9d_data.mixture.order import MixtureOrder, assign, whole_weights
from d9d_data.mixture.stream import MixturePacks, MixtureSamples, MixtureStream, build_mixture
from d9d_data.order.layout import Layout
from d9d_data.order.permutation import Permutation
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.one_pass import OnePassPacks, _block_size, _without_targets
from d9d_testing.toy.config import ToyDataConfig

CONTEXT = DataContext(3, 4, 2, Path("absent"))


class Part:
    """Stream of a part: sample n has the tokens n and n + 1, unless other fields are given."""

    def __init__(self, facts: Mapping[str, Any] | None = None, **fields: Any) -> None:
        self.source, self.facts, self.fields = self, dict(facts or {}), fields
        self.closed = 0

    def pack_at(self, consumed: int) -> list[dict[str, Any]]:
        own = {"tokens": np.asarray([[consumed, consumed + 1]]), "targets": np.asarray([[consumed + 1, -100]])}
        return [{**own, **self.fields}]

    def state(self) -> dict[str, Any]:
        return {"fingerprint": "f"}

    def save_assets(self, directory: Path) -> None:
        for name in self.facts.get("files", ()):
            (directory / name).write_text(str(self.facts["tokenizer"]))

    def close(self) -> None:
        self.closed += 1


def config(*parts: Any, **more: Any) -> Any:
    made = [MixturePart.model_construct(weight=weight, epochs=epochs, data=ToyDataConfig()) for weight, epochs in parts]
    return MixtureConfig.model_construct(parts=tuple(made), workers=more.get("workers", 0))


def mixture(*streams: Any, epochs: float | None = None, context: DataContext = CONTEXT) -> MixtureStream:
    return MixtureStream(config(*[(1.0, epochs)] * len(streams)), context, list(streams))


# --- mixtures


def test_common_facts_are_the_largest_the_first_or_the_sum() -> None:
    first = Part({"sequence_length": 8, "vocab_size": 9, "tokenizer": "t", "cut_documents": 2, "samples": 3})
    second = Part({"sequence_length": 5, "vocab_size": 11, "tokenizer": "u", "cut_documents": 5, "dropped": 1})
    third = Part({"num_classes": 2})
    assert mixture(first, second, third).facts == {
        "sequence_length": 8, "vocab_size": 11, "num_classes": 2, "tokenizer": "t", "cut_documents": 7, "dropped": 1,
        "parts": [{"dataset": "toy_data", "weight": 1.0, **part.facts} for part in (first, second, third)],
    }  # fmt: skip
    ending = mixture(Part({"samples": 3}), Part({"samples": 4}), epochs=0.5)
    assert ending.facts == {
        "samples": 2 + 2,
        "parts": [{"dataset": "toy_data", "weight": 1.0, "epochs": 0.5, "samples": count} for count in (3, 4)],
    }
    named = [Part({"labels": ["a"], "texts": ["q"], "texts_per_sample": 1, "incomplete": 1}) for _ in range(2)]
    facts = mixture(*named).facts
    assert (facts["labels"], facts["texts"], facts["texts_per_sample"], facts["incomplete"]) == (["a"], ["q"], 1, 2)


def test_files_of_earlier_parts_stay_and_all_parts_are_closed(tmp_path: Path) -> None:
    first, second = Part({"files": ["a"], "tokenizer": "1"}), Part({"files": ["a", "b"], "tokenizer": "2"})
    both = mixture(first, second)
    both.save_assets(tmp_path)
    assert [(tmp_path / name).read_text() for name in "ab"] == ["1", "2"]
    both.close()
    assert (first.closed, second.closed) == (1, 1)


def test_parts_have_one_tokenizer_and_the_same_names() -> None:
    def tokenized(name: str) -> Part:
        return Part({"files": ["tokenizer.json"], "tokenizer": name})

    mixture(Part(), tokenized("a"), tokenized("a"))
    with pytest.raises(DataError, match=r"^data.parts: parts\[1\] and parts\[2\] have different tokenizers, so"):
        mixture(Part(), tokenized("a"), tokenized("b"))
    with pytest.raises(DataError) as caught:
        mixture(Part(), Part({"texts": ["a", "b"]}))
    assert str(caught.value) == (
        "data.parts: names of the texts in parts[0]: none; in parts[1]: a, b; mix datasets with the same texts"
    )


def test_each_part_has_its_own_seed_and_packs_of_one_sample() -> None:
    given: list[Any] = []

    def build(data: Any, context: DataContext) -> Any:
        given.append(context)
        return Part({"rows": 2, "samples": 2})

    both = config((1.0, None), (1.0, None), workers=0)
    stream = build_mixture(both, CONTEXT, build)
    seeds = [int.from_bytes(hashlib.sha256(f"seed 3 part {part}".encode()).digest()[:6], "big") for part in range(2)]
    assert [one.seed for one in given] == seeds
    assert {(one.batch_size, one.microbatch_size, one.rank, one.ranks) for one in given} == {(1, 1, 0, 1)}
    assert isinstance(stream, MixtureStream)

    def fails(_data: Any, context: DataContext) -> Any:
        if context.seed == seeds[1]:
            raise DataError("data.field: it is missing")
        return Part()

    with pytest.raises(DataError, match=r"^data.parts\[1\].data.field: it is missing$"):
        build_mixture(both, CONTEXT, fails)


def test_errors_of_parts_begin_with_their_place() -> None:
    for text, placed in (
        ("data.x: bad", "data.parts[2].data.x: bad"), ("data: bad", "data.parts[2].data: bad"),
        ("bad", "data.parts[2].data: bad"), ("database", "data.parts[2].data: database"),
    ):  # fmt: skip
        error = DataError(text)
        error.origin = KeyError()
        found = mixed._placed(error, 2)
        assert (str(found), found.origin) == (placed, error.origin)


def test_fields_that_a_mixture_decides_are_refused_in_parts() -> None:
    given: Any = {"sources": ("a",), "sequence_length": 8}
    mixed._check_fields(MixturePart.model_construct(data=TextConfig(**given)), 1)
    mixed._check_fields(MixturePart.model_construct(data=ToyDataConfig()), 1)
    with pytest.raises(DataError) as caught:
        mixed._check_fields(MixturePart.model_construct(data=DocumentsConfig(**given, bucket_window=4)), 1)
    assert str(caught.value) == (
        "data.parts[1].data.bucket_window: has no effect in a mixture; remove it, because packs are formed of all parts"
    )


def test_padding_is_on_the_right_with_one_value() -> None:
    def padded(**fields: Any) -> Any:
        return SimpleNamespace(data=SimpleNamespace(**fields))

    assert mixed._fill([padded(padding={"x": 1, "y": 2.5}), padded(), padded(padding={"x": 1}, side="right")]) == {
        "x": 1, "y": 2.5,
    }  # fmt: skip
    with pytest.raises(DataError, match=r"^data.parts\[1\].data.side: padding on the left cannot be mixed; use 'rig"):
        mixed._fill([padded(), padded(side="left")])
    with pytest.raises(DataError, match=r"^data.parts\[1\].data.padding: pads 'x' with 2, another part with 1; use"):
        mixed._fill([padded(padding={"x": 1}), padded(padding={"x": 2})])


@pytest.mark.parametrize(
    ("epochs", "samples", "limit"), [(None, 7, None), (1.0, 7, 7), (0.5, 7, 4), (0.1, 10, 1), (2.1, 10, 21)]
)
def test_a_part_gives_its_epochs_rounded_up(epochs: float | None, samples: int, limit: int | None) -> None:
    part: Any = SimpleNamespace(epochs=epochs, data=SimpleNamespace(selector="s"))
    assert mixed._limit(part, {"samples": samples}, 0) == limit


def test_a_mixture_for_one_pass_numbers_rows_part_after_part(tmp_path: Path) -> None:
    context = DataContext(3, 4, 2, tmp_path, one_pass=True)

    def part(first: int, rows: int = 2, **facts: Any) -> Part:
        made = Part({"samples": 2, "rows": rows, **facts})
        made.pack_at = lambda consumed: [{"tokens": np.asarray([[first + consumed]]), "rows": np.asarray([consumed])}]  # type: ignore[method-assign]
        return made

    stream = mixture(part(10), part(20), part(30, 4), context=context).one_pass(context)
    found = [stream.next_pack() for _ in range(2)]
    tokens = [[batch["tokens"].flatten().tolist() for batch in pack] for pack in found]
    rows = [[batch["rows"].tolist() for batch in pack] for pack in found]
    assert tokens == [[[10, 11], [20, 21]], [[30, 31], [10, 10]]]
    assert rows == [[[0, 1], [2, 3]], [[4, 5], [-1, -1]]]
    assert (stream.facts["samples"], stream.facts["rows"], "packed" in stream.facts) == (6, 8, False)
    packed = [part(10, packed=True), part(20, packed=True)]
    assert mixture(*packed, context=context).one_pass(context).facts["packed"] is True
    with pytest.raises(
        DataError, match=r"^data.parts\[1\].data: dataset 'toy_data' cannot make a pass .* fact 'rows'$"
    ):
        mixture(part(10), part(20, rows="unknown"), context=context).one_pass(context)  # type: ignore[arg-type]
    with pytest.raises(
        DataError, match=r"^data.parts\[1\].data: dataset 'toy_data' and the dataset of parts\[0\] diff"
    ):
        mixture(part(10), part(20, packed=True), context=context).one_pass(context)


def test_samples_of_several_rows_have_their_rows_numbered() -> None:
    def merged(places: Any) -> Any:
        return {"rows": np.asarray([row for part, place in places for row in (2 * place, 2 * place + 1)])}

    packs: Any = SimpleNamespace(merged=merged)
    samples = MixtureSamples(packs, (0, 3), (0, 6))
    assert samples.microbatch(np.asarray([0, 2, 3, 4]))["rows"].tolist() == [0, 1, 4, 5, 6, 7, 8, 9]
    assert samples.sizes(np.asarray([4, 1])).tolist() == [0, 0]


def test_ranks_take_runs_of_a_pack_with_completed_samples() -> None:
    order: Any = lambda number: (number % 2, number // 2)  # noqa: E731
    parts: Any = (
        Part(samples=np.asarray([0])),
        Part(samples=np.asarray([0]), weights=np.asarray([[0.5, 0.0]], dtype=np.float32)),
    )
    packs = [MixturePacks(parts, order, Layout(8, 2, rank, 2), True, True, (0, 10), {}) for rank in range(2)]
    first, second = (pack.pack_at(8) for pack in packs)
    assert [batch["tokens"].tolist() for batch in first] == [[[4, 5], [4, 5]], [[5, 6], [5, 6]]]
    assert [batch["tokens"].tolist() for batch in second] == [[[6, 7], [6, 7]], [[7, 8], [7, 8]]]
    assert first[0]["weights"].tolist() == [[1.0, 0.0], [0.5, 0.0]]
    assert first[0]["weights"].dtype == np.float32
    assert first[0]["samples"].tolist() == [0, 10]
    assert first[0]["lengths"].tolist() == [2, 2]
    plain = MixturePacks(parts, order, Layout(8, 2, 0, 2), False, False, (0, 10), {})
    assert plain.completed({"x": np.ones(1)}, 1) == {"x": np.ones(1)}
    assert "lengths" not in plain.completed(parts[0].pack_at(0)[0], 0)
    assert "weights" not in plain.completed(parts[0].pack_at(0)[0], 0)
    # Parts that count no losses have none, one list for each row.
    assert packs[1].lost_at(8) == [[[], []], [[], []]]

    class Loses(Part):
        def lost_at(self, consumed: int) -> Any:
            return [[[consumed]]]

    losing: Any = (Loses(), parts[1])
    lost = MixturePacks(losing, order, Layout(8, 2, 1, 2), True, True, (0, 10), {}).lost_at(8)
    assert lost == [[[6], []], [[7], []]]


def test_parts_are_alike_in_names_kinds_and_sizes() -> None:
    parts: Any = [SimpleNamespace(data=SimpleNamespace(selector=name)) for name in "ab"]
    one = {"x": np.zeros((1, 3), dtype=np.int64), "y": np.zeros(1, dtype=np.float32)}
    mixed._check_alike([one, {**one, "x": np.zeros((1, 5), dtype=np.int64)}], parts)
    for other, differing in (
        ({**one, "x": np.zeros((1, 3), dtype=np.int32)}, "x"), ({**one, "x": np.zeros((2, 3), dtype=np.int64)}, "x"),
        ({**one, "x": np.zeros((1, 3, 1), dtype=np.int64)}, "x"), ({"x": one["x"]}, "y"),
        ({**one, "z": one["y"], "y": np.zeros(1)}, "y, z"),
    ):  # fmt: skip
        with pytest.raises(DataError) as caught:
            mixed._check_alike([one, other], parts)
        assert f"gives {', '.join(sorted(other))}; {differing} do not fit in one microbatch" in str(caught.value)


def test_weights_are_assigned_by_the_earliest_deadline() -> None:
    for weights, pattern in (
        ((1,), [0]), ((1, 1), [0, 1]), ((2, 1), [0, 1, 0]), ((1, 2), [1, 0, 1]), ((3, 1), [0, 0, 1, 0]),
        ((2, 1, 1), [0, 1, 2, 0]), ((1, 1, 1), [0, 1, 2]),
    ):  # fmt: skip
        assert assign(weights).tolist() == pattern
    assert whole_weights([4, 6]) == (2, 3)
    assert whole_weights([0.25]) == (1,)
    assert whole_weights([1, (1 << 16) - 1]) == (1, 65535)
    order = MixtureOrder([1, 1], [2, 3])
    assert [order(number) for number in range(10)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (1, 2), (0, 2), (1, 3), (0, 3), (1, 4), (1, 5),
    ]  # fmt: skip
    assert order.samples == 5
    endless = MixtureOrder([1, 1], [1, None])
    assert ([endless(number) for number in range(4)], endless.samples) == ([(0, 0), (1, 0), (1, 1), (1, 2)], None)


def test_padding_of_merged_samples_has_the_value_of_its_field() -> None:
    def sample(length: int, **more: Any) -> dict[str, Any]:
        row = np.arange(1, length + 1)[None]
        return {
            "tokens": row,
            "labels": row,
            "x": row.astype(np.float32)[..., None],
            "one": np.asarray([length]),
            **more,
        }

    merged = merge([sample(1), sample(3)], {"x": 0.5})
    assert merged["tokens"].tolist() == [[1, 0, 0], [1, 2, 3]]
    assert merged["labels"].tolist() == [[1, -100, -100], [1, 2, 3]]
    assert merged["x"][..., 0].tolist() == [[1.0, 0.5, 0.5], [1.0, 2.0, 3.0]]
    assert merged["one"].tolist() == [1, 3]
    assert merged["x"].dtype == np.float32
    lengths = with_lengths(sample(3))
    assert lengths["lengths"].tolist() == [3]
    assert with_lengths({**lengths, "lengths": np.asarray([2])})["lengths"].tolist() == [2]
    # Without lengths, a sample has no padding yet.
    places = merge([{"positions": np.asarray([[0, 1]])}, {"positions": np.asarray([[0, 1, 2, 3]])}])
    assert places["positions"].tolist() == [[0, 1, 0, 1], [0, 1, 2, 3]]
    documents = merge([{"documents": np.asarray([[0, 1]])}, {"documents": np.asarray([[0, 0, 0]])}])
    assert documents["documents"].tolist() == [[0, 1, 2], [0, 0, 0]]


# --- one pass


def test_blocks_are_sorted_and_the_last_samples_are_repeated_without_targets() -> None:
    class Source:
        def sizes(self, samples: Any) -> Any:
            return np.asarray([5, 1, 4, 1, 3, 2])[samples]

        def microbatch(self, samples: Any) -> Any:
            return {"x": samples, "rows": samples, "targets": samples + 10, "weights": np.ones(len(samples))}

    packs = OnePassPacks(Source(), 6, Layout(8, 2, 0, 1), 4)
    found = packs.pack_at(0)
    assert [batch["x"].tolist() for batch in found] == [[1, 3], [2, 0], [5, 4], [0, 0]]
    assert [batch["rows"].tolist() for batch in found] == [[1, 3], [2, 0], [5, 4], [-1, -1]]
    assert [batch["targets"].tolist() for batch in found][3] == [-100, -100]
    assert [batch["weights"].tolist() for batch in found][2:] == [[1, 1], [0, 0]]
    second = OnePassPacks(Source(), 5, Layout(8, 2, 1, 2), 2)
    assert [batch["x"].tolist() for batch in second.pack_at(0)] == [[4, 4], [0, 0]]
    assert [batch["rows"].tolist() for batch in second.pack_at(0)] == [[4, -1], [-1, -1]]


def test_fillers_of_contrastive_samples_have_texts_of_length_0() -> None:
    batch = {"rows": np.arange(4), "samples": np.arange(2), "lengths": np.asarray([3, 4, 5, 6]), "labels": np.arange(4)}
    found = _without_targets(batch, 1, 1)
    assert {name: values.tolist() for name, values in found.items()} == {
        "rows": [0, 1, -1, -1], "samples": [0, 1], "lengths": [3, 4, 0, 0], "labels": [0, 1, -100, -100],
    }  # fmt: skip
    assert batch["rows"].tolist() == [0, 1, 2, 3]
    predicted = _without_targets({**batch, "targets": np.arange(4)}, 1, 1)
    assert (predicted["lengths"].tolist(), predicted["targets"].tolist()) == ([3, 4, 5, 6], [0, 1, -100, -100])
    texts = {"rows": np.arange(2), "labels": np.asarray(["a", "b"])}
    assert _without_targets(texts, 1, 1)["labels"].tolist() == ["a", "b"]


def test_batches_that_give_each_rank_whole_blocks_are_named() -> None:
    assert _block_size(Layout(64, 2, 0, 2), None) == 8
    assert _block_size(Layout(1024, 2, 0, 2), None) == 16
    assert _block_size(Layout(96, 2, 0, 3), None) == 4
    for ranks, count in itertools.product((1, 2, 4, 8), range(1, 70)):
        if count % ranks == 0:  # these ranks always have whole blocks, of the same size
            assert _block_size(Layout(count, 1, 0, ranks), None) == _block_size(Layout(count, 1, 0, 1), None)
    with pytest.raises(DataError) as caught:
        _block_size(Layout(96, 2, 0, 16), None)
    assert str(caught.value) == (
        "batch.size: one pass over the data sorts blocks of 4 samples by length, so the samples of a rank must be a "
        "multiple of 4; a batch of 96 over 16 ranks gives 6 to each; use a batch of 256, or set bucket_window "
        "of this data to 2, which disables sorting"
    )
    assert _block_size(Layout(96, 2, 0, 16), 2) == 2


# --- users' datasets


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
        ({}, "^data.collate: m:c returned a dict; return a mapping"), ([1], "returned a list; return"),
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

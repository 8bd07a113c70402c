"""Mixtures, exactly: facts, orders, merged microbatches and rows of one pass."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.config import DocumentsConfig, TextConfig
from d9d_data.mixture import stream as mixed
from d9d_data.mixture.config import MixtureConfig, MixturePart
from d9d_data.mixture.merge import merge, with_lengths
from d9d_data.mixture.order import MixtureOrder, assign, whole_weights
from d9d_data.mixture.stream import MixturePacks, MixtureSamples, MixtureStream, build_mixture
from d9d_data.order.layout import Layout
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

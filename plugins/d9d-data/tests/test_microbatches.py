"""Bins, padding and merged samples of small corpora, element by element."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.corpus.prepare import Ends
from d9d_data.mixture.merge import merge, with_lengths
from d9d_data.mixture.stream import MixturePacks, MixtureSamples, MixtureStream
from d9d_data.stream import binned
from d9d_data.stream.bins import Bins, Pieces, best_fit, cut_pieces, next_fit, pack_bins
from d9d_data.stream.padding import pad, pad_texts

NONE = -100
#: Documents 10 11 12 13, 20, and 30 31 32 33 34 35; the last token of each ends it.
TOKENS = np.asarray([10, 11, 12, 13, 20, 30, 31, 32, 33, 34, 35], dtype=np.uint16)
STARTS = np.asarray([0, 4, 5, 11])
LEARNED = np.asarray([1, 0, 1, 1, 1, 1, 1, 0, 1, 1, 0], dtype=np.bool_)
SCALES = np.arange(11, dtype=np.float32) / 2


def listed(bins: Bins) -> list[list[int]]:
    members, starts = bins.members.tolist(), bins.starts.tolist()
    return [members[first:end] for first, end in pairwise(starts)]


def test_long_items_come_first_each_into_the_fullest_bin_that_fits() -> None:
    bins = best_fit(np.asarray([5, 3, 4, 2, 6]), 8)
    # 6, 5 and 4 open bins with 2, 3 and 4 left; 3 fills the second, 2 the first.
    assert listed(bins) == [[3, 4], [0, 1], [2]]
    assert len(bins) == 3
    assert bins.unused == pytest.approx(4 / 24)
    assert listed(best_fit(np.asarray([8, 8]), 8)) == [[0], [1]]
    assert listed(best_fit(np.asarray([1, 7, 1]), 8)) == [[0, 1], [2]]


def test_items_fill_bins_in_order_to_the_last_position() -> None:
    bins = next_fit(np.asarray([3, 3, 2, 8, 1, 8]), 8)
    assert listed(bins) == [[0, 1, 2], [3], [4], [5]]
    assert bins.unused == pytest.approx(7 / 32)
    assert next_fit(np.zeros(0, dtype=np.int64), 8).unused == 0.0


def test_documents_are_cut_into_pieces_of_a_sample_and_a_rest() -> None:
    pieces = cut_pieces(np.asarray([0, 4, 5, 12, 18]), 3)
    assert pieces.firsts.tolist() == [0, 5, 8, 12, 15]
    assert pieces.lengths.tolist() == [3, 3, 3, 3, 2]
    assert pieces.targets is None


def test_a_bin_holds_its_pieces_one_behind_the_other_and_padding() -> None:
    pieces = Pieces(np.asarray([0, 4, 5]), np.asarray([3, 0, 5]))
    bins = Bins(np.asarray([2, 1, 0]), np.asarray([0, 2, 3]), 0.0)
    found = pack_bins(TOKENS, LEARNED, pieces, bins, np.asarray([0, 1]), 8, SCALES)
    assert {name: values.tolist() for name, values in found.items()} == {
        "tokens": [[30, 31, 32, 33, 34, 20, 35, 35], [10, 11, 12, 35, 35, 35, 35, 35]],
        "targets": [[31, NONE, 33, 34, NONE, NONE, NONE, NONE], [NONE, 12, 13, *[NONE] * 5]],
        "positions": [[0, 1, 2, 3, 4, 0, 0, 1], [0, 1, 2, 0, 1, 2, 3, 4]],
        "documents": [[0, 0, 0, 0, 0, 1, 2, 2], [0, 0, 0, 1, 1, 1, 1, 1]],
        "weights": [[3.0, 0.0, 4.0, 4.5, 0.0, 0.0, 0.0, 0.0], [0.0, 1.0, 1.5, *[0.0] * 5]],
        "lengths": [6, 3],
    }
    plain = pack_bins(TOKENS, None, pieces, bins, np.asarray([1]), 4)
    assert plain["targets"].tolist() == [[11, 12, 13, NONE]]
    assert "weights" not in plain
    # Pieces whose last positions have no target.
    short = Pieces(np.asarray([0, 4, 5]), np.asarray([3, 0, 5]), np.asarray([2, 0, 5]))
    assert pack_bins(TOKENS, None, short, bins, np.asarray([1]), 4)["targets"].tolist() == [[11, 12, NONE, NONE]]


def test_padded_documents_have_targets_weights_and_lengths() -> None:
    found = pad(TOKENS, STARTS, np.asarray([0, 1, 2]), 4, 2, LEARNED, SCALES)
    assert {name: values.tolist() for name, values in found.items()} == {
        "tokens": [[10, 11, 12, 35], [20, 35, 35, 35], [30, 31, 32, 33]],
        "targets": [[NONE, 12, 13, NONE], [NONE] * 4, [31, NONE, 33, 34]],
        "positions": [[0, 1, 2, 0], [0, 0, 1, 2], [0, 1, 2, 3]],
        "documents": [[0, 0, 0, 1], [0, 1, 1, 1], [0, 0, 0, 0]],
        "lengths": [3, 1, 4],
        "weights": [[0.0, 1.0, 1.5, 0.0], [0.0] * 4, [3.0, 0.0, 4.0, 4.5]],
    }
    assert pad(TOKENS, STARTS, np.asarray([0]), 4, 2)["targets"].tolist() == [[11, 12, 13, NONE]]
    assert pad(TOKENS, STARTS, np.asarray([0]), 12, 6)["tokens"].shape == (1, 6)


@pytest.mark.parametrize(
    ("ends", "first", "last"),
    [
        (Ends(), [10, 11, 12], [30, 31, 32]),
        (Ends(keep=True), [10, 11, 13], [30, 31, 35]),
        (Ends(from_end=True), [11, 12, 13], [33, 34, 35]),
        (Ends(1, keep=True), [10, 11, 12], [30, 31, 34]),
    ],
)
def test_texts_that_are_too_long_lose_their_middle_their_end_or_their_beginning(
    ends: Ends, first: list[int], last: list[int]
) -> None:
    labels = np.arange(11, dtype=np.int32)
    found = pad_texts(TOKENS, STARTS, np.asarray([0, 1, 2]), 3, 1, labels, ends, label_each=True)
    assert found["tokens"].tolist() == [first, [20, 35, 35], last]
    places = {int(token): place for place, token in enumerate(TOKENS)}
    expected = [[places[token] for token in row] for row in (first, [20], last)]
    assert [row[: len(own)] for row, own in zip(found["labels"].tolist(), expected, strict=True)] == expected
    assert found["labels"][1].tolist() == [4, NONE, NONE]
    assert found["lengths"].tolist() == [3, 1, 3]
    whole = pad_texts(TOKENS, STARTS, np.asarray([0, 2]), 8, 8, labels)
    assert whole["labels"].tolist() == [0, 5]  # of the first token
    assert whole["lengths"].tolist() == [4, 6]
    assert whole["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 0, 1]]
    assert "labels" not in pad_texts(TOKENS, STARTS, np.asarray([0]), 8, 1)


def test_merged_arrays_are_filled_as_their_parts_say() -> None:
    def sample(length: int, **more: Any) -> dict[str, Any]:
        return {"tokens": np.full((1, length), 5), "labels": np.full((1, length), 2), **more}

    merged = merge([sample(1, own=np.ones((1, 1, 2))), sample(3, own=np.ones((1, 3, 2)))], {"tokens": 9})
    assert merged["tokens"].tolist() == [[5, 9, 9], [5, 5, 5]]
    assert merged["labels"].tolist() == [[2, NONE, NONE], [2, 2, 2]]
    assert merged["own"].tolist() == [[[1, 1], [0, 0], [0, 0]], [[1, 1]] * 3]
    assert with_lengths({"tokens": np.zeros((2, 3))})["lengths"].tolist() == [3, 3]
    ones = merge([{"samples": np.asarray([4])}, {"samples": np.asarray([6, 7])}])
    assert ones["samples"].tolist() == [4, 6, 7]


def test_a_row_as_long_as_a_sample_is_no_reason_to_refuse_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    monkeypatch.setattr(binned, "one_pass_of", lambda *given: made.append(given))

    def opened(length: int) -> Any:
        corpus = SimpleNamespace(starts=np.asarray([0, 4, 6]), ends=Ends(), predicts=False, digest="d")
        config = SimpleNamespace(sequence_length=length)
        return binned.one_pass_of_bins(config, SimpleNamespace(microbatch_size=3), corpus)  # type: ignore[arg-type]

    opened(4)
    _, source, sizes, _, _, identity, facts, microbatch = made[0]
    assert (sizes, identity, microbatch) == ((2, 2), "bins in order d 4", 3)
    assert facts == {"packed": True, "unused_positions": 0.25}
    assert source.pieces.lengths.tolist() == [4, 2]
    assert source.pieces.targets.tolist() == [3, 1]
    assert source.sizes(np.asarray([0, 1])).tolist() == [4, 4]
    with pytest.raises(DataError, match="data.packing: 1 rows are longer than 3 positions, and packing truncates"):
        opened(3)


def test_facts_of_a_mixture_are_the_largest_sizes_and_the_sums_of_counts() -> None:
    stream = object.__new__(MixtureStream)
    facts = [
        {"vocab_size": 5, "sequence_length": 8, "cut_documents": 2, "tokenizer": "a", "samples": 3},
        {"vocab_size": 7, "sequence_length": 4, "cut_documents": 3, "num_classes": 2},
        {"num_classes": 6, "tokenizer": "b", "dropped": 1},
    ]
    stream._streams = [SimpleNamespace(facts=own) for own in facts]
    stream._parts = tuple(
        SimpleNamespace(data=SimpleNamespace(selector=name), weight=weight, epochs=epochs)
        for name, weight, epochs in (("x", 1.0, None), ("y", 2.0, 3.0), ("z", 1.0, None))
    )
    stream._order = SimpleNamespace(samples=40)  # type: ignore[assignment]
    found = dict(stream.facts)
    assert found.pop("parts") == [
        {"dataset": "x", "weight": 1.0, **facts[0]}, {"dataset": "y", "weight": 2.0, "epochs": 3.0, **facts[1]},
        {"dataset": "z", "weight": 1.0, **facts[2]},
    ]  # fmt: skip
    assert found == {
        "sequence_length": 8, "vocab_size": 7, "num_classes": 6, "tokenizer": "a", "cut_documents": 5, "dropped": 1,
        "samples": 40,
    }  # fmt: skip
    stream._order = SimpleNamespace(samples=None)  # type: ignore[assignment]
    assert "samples" not in stream.facts


class Source:
    """Source of a part with samples of one token, which is its index."""

    def __init__(self, part: int) -> None:
        self.part = part

    def pack_at(self, place: int) -> list[dict[str, Any]]:
        row = np.asarray([[10 * self.part + place]])
        return [{"tokens": row, "targets": row, "samples": np.asarray([place]), "rows": np.asarray([place])}]


def test_ranks_of_a_mixture_read_runs_of_a_pack_and_number_the_samples_of_all_parts() -> None:
    layout = SimpleNamespace(rank=1, share=4, microbatch_size=2)
    order: Any = lambda number: (number % 2, number // 2)  # noqa: E731
    packs = MixturePacks((Source(0), Source(1)), order, layout, True, True, (0, 100), {})  # type: ignore[arg-type]
    first, second = packs.pack_at(8)  # samples 12 to 15
    assert first["tokens"].tolist() == [[6], [16]]
    assert second["samples"].tolist() == [7, 107]
    assert first["lengths"].tolist() == [1, 1]
    assert first["weights"].tolist() == [[1.0], [1.0]]
    assert packs.lost_at(8) == [[[], []], [[], []]]  # the parts do not know
    samples = MixtureSamples(packs, (0, 3), (0, 50))
    found = samples.microbatch(np.asarray([2, 3, 5]))
    assert found["tokens"].tolist() == [[2], [10], [12]]
    assert found["rows"].tolist() == [2, 50, 52]
    assert samples.sizes(np.asarray([1, 2])).tolist() == [0, 0]


class Telling(Source):
    """Source that knows the number of tokens that a document has lost."""

    def lost_at(self, consumed: int) -> list[list[list[int]]]:
        return [[[consumed + 1]]]


def test_losses_of_a_mixture_are_at_the_rows_of_their_documents() -> None:
    layout = SimpleNamespace(rank=0, share=3, microbatch_size=3)
    order: Any = lambda number: (number % 2, number)  # noqa: E731
    packs = MixturePacks((Source(0), Telling(1)), order, layout, False, False, (0, 0), {})  # type: ignore[arg-type]
    assert packs.lost_at(0) == [[[], [2], []]]
    assert packs.lost_at(3) == [[[4], [], [6]]]

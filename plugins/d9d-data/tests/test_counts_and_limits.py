"""Small parts of a corpus, exactly: labels, limits of texts, counts of losses, shards, layouts, windows and places."""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.corpus.encoding import Encoding
from d9d_data.corpus.fit import NONE, Limit, Tally, TooLongError, Words, losses, nothing_left, readings, stops
from d9d_data.corpus.plan import Shard, plan_shards
from d9d_data.corpus.prepare import WHOLE, Corpus, Ends, _amount
from d9d_data.corpus.shards import Skips, read_shard, token_dtype, write_shard
from d9d_data.fields.label_table import Classes, LabelTable
from d9d_data.order.layout import Layout
from d9d_data.order.permutation import Permutation
from d9d_data.order.samples import SampleOrder
from d9d_data.order.windows import WindowOrder
from d9d_data.sources.document import Piece
from d9d_data.sources.opening import SourceFile
from d9d_data.sources.place import Place
from d9d_data.stream.base import PackStream, facts_of
from d9d_data.stream.documents import _window
from d9d_data.stream.text import TextSamples

RECORDS = Words("records", "a reply was cut")


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Piece:
    """File of ten lines of 10 bytes, in the working directory."""
    monkeypatch.chdir(tmp_path)
    path = Path("a.jsonl")
    path.write_text("".join(f'{{"t":"{i}"}}\n' for i in range(10)))
    assert path.stat().st_size == 100
    return Piece(SourceFile("a.jsonl", "jsonl"))


def test_minus_100_is_no_label_and_100_is_a_class() -> None:
    table = LabelTable(None)
    assert [table.check(value, "w") for value in (-100, -100.0, "-100x", 100, "100", 3.0)] == [
        -100, -100, "-100x", 100, "100", 3,
    ]  # fmt: skip
    assert [table.id_of(label) for label in (7, -100, "a", 7, 100)] == [0, -100, 1, 0, 2]
    assert table.labels == (7, "a", 100)
    classes = Classes([table.labels[::2], [5]], None)
    assert (classes.count, classes.names) == (101, None)
    assert classes.mapped(np.asarray([1, -100, 0], dtype=np.int32), [7, 100]).tolist() == [100, -100, 7]
    assert Classes([[]], None).count == 0


def test_numbers_of_classes_have_a_limit_and_listed_names_have_their_places() -> None:
    table = LabelTable(None)
    assert table.check((1 << 20) - 1, "w") == 1048575
    for wrong in (1 << 20, -1):
        with pytest.raises(DataError, match=rf"w is {wrong}; class numbers are 0 to 1,048,575, or -100"):
            table.check(wrong, "w")
    listed = LabelTable(["no", "yes"])
    assert [listed.id_of(listed.check(value, "w")) for value in ("yes", "no", 1, "1", True, -100)] == [
        1, 0, 1, 1, 1, -100,
    ]  # fmt: skip
    with pytest.raises(DataError, match="w is 2; class numbers are 0 to 1, or"):
        listed.check(2, "w")
    with pytest.raises(DataError, match="unknown name 'yess'; did you mean 'yes'"):
        listed.check("yess", "w")
    with pytest.raises(DataError, match="data.labels has no, yes"):
        listed.check("zzzzzz", "w")
    classes = Classes([["yes"]], ["no", "yes"])
    assert (classes.count, classes.names) == (2, ("no", "yes"))
    names = Classes([["b"], ["a", "b"]], None)
    assert (names.count, names.names) == (2, ("a", "b"))
    assert names.mapped(np.asarray([0, 1, -100], dtype=np.int32), ["b", "a"]).tolist() == [1, 0, -100]
    assert Classes([["3"], [3, "0"]], None).count == 4
    with pytest.raises(DataError, match=r"names \('b'\) and others numbers \(2\)"):
        Classes([[3, "b"], [2, "c"]], None)


@pytest.mark.parametrize(
    ("policy", "of_four", "of_six"),
    [("cut_end", (0, 4), (0, 4)), ("cut_start", (0, 4), (2, 6)), ("drop", (0, 4), None)],
)
def test_a_text_as_long_as_the_limit_is_whole(policy: Any, of_four: tuple[int, int], of_six: Any) -> None:
    limit = Limit(4, policy)
    assert limit.kept(4, "w") == slice(*of_four)
    assert limit.kept(6, "w") == (None if of_six is None else slice(*of_six))
    assert limit.kept(0, "w") == slice(0, 0)
    assert Limit(4, "error").kept(4, "w") == slice(0, 4)
    with pytest.raises(TooLongError, match="w has 5 tokens, but a sequence at most 4;"):
        Limit(4, "error").kept(5, "w")
    assert Limit(4).too_long == "cut_end"


def test_tallies_are_summed_and_written() -> None:
    one = Tally(1, 20, 3, 4, 5, 0, 7, "", 9, {"a": 1})
    two = Tally(10, 2, 30, 40, 50, 60, 70, "<s>", 90, {"b": 2, "a": 3})
    both = one + two
    assert both == Tally(11, 20, 33, 44, 55, 60, 77, "<s>", 99, {"a": 4, "b": 2})
    assert two + one == both
    assert (two + Tally(needed=8, spelling="<t>")).needed == 8
    assert (two + Tally(spelling="<t>")).spelling == "<s>"
    assert Tally.of(both.written()) == both
    assert both.stopped == 6
    assert one + NONE == one


def test_more_than_one_record_in_a_hundred_that_loses_tokens_is_a_warning() -> None:
    limit = Limit(1000)
    assert list(losses(Tally(records=5, longest=9), limit, RECORDS)) == []
    line = "cut 10 of 1,000 records to 1,000 tokens, longest 2,000"
    counts: dict[str, Any] = {"records": 1000, "longest": 2000}
    assert list(losses(Tally(cut=10, **counts), limit, RECORDS)) == [line]
    assert list(losses(Tally(cut=10, incomplete=3, **counts), limit, RECORDS)) == [f"{line}; in 3 a reply was cut"]
    assert list(losses(Tally(cut=10, incomplete=3, **counts), limit, Words("records"))) == [line]
    (cut,) = losses(Tally(cut=50, **counts), limit, RECORDS, choosable=False)
    assert cut.endswith("; use a larger sequence_length")
    (cut,) = losses(Tally(cut=11, **counts), limit, RECORDS)
    assert cut.startswith("warning: cut 11 of 1,000 records")
    assert cut.endswith("with the dataset's field too_long")
    left = "left out 10 of 1,000 records that are too long, or have no token to learn in 1,000 tokens, longest 2,000"
    assert list(losses(Tally(dropped=10, **counts), limit, RECORDS)) == [left]
    (dropped,) = losses(Tally(dropped=11, **counts), limit, RECORDS)
    assert dropped.startswith("warning: left out 11 of 1,000")


def test_records_with_two_readings_and_tokens_to_stop_are_counted() -> None:
    assert list(readings(Tally(records=5), RECORDS, "text")) == []
    spelled = Tally(records=5, spelled=2, spelling="<s>")
    line = "2 of 5 records spell special tokens, such as <s>, which are read as "
    assert list(readings(spelled, RECORDS, "token")) == [f"{line}these tokens"]
    (text,) = readings(spelled, RECORDS, "text")
    assert text.startswith(f"{line}ordinary text;")
    (parsed,) = readings(Tally(records=5, parsed=3), RECORDS, "text")
    assert parsed.startswith("3 of 5 records have tool arguments that are JSON strings")
    tally = Tally(records=9, dropped=2, stops={"a": 1, "b": 4})
    assert stops(tally, RECORDS) == "stop token learned in 5 of 7 records: b, a"
    assert stops(Tally(records=9), RECORDS).startswith("warning: stop token learned in 0 of 9 records: the model")


def test_a_corpus_without_a_record_left_says_which_length_has_one() -> None:
    tally = Tally(records=3, dropped=3, longest=50, needed=31)
    needed = str(nothing_left(tally, Limit(20), RECORDS))
    assert "none of the 3 records has a token to learn in its first 20 tokens" in needed
    assert "prompts alone have 30 tokens and more" in needed
    assert "(the longest has 50); use a sequence_length of more than 30, or" in needed
    for limit, found in ((Limit(20, "drop"), tally), (Limit(20), Tally(dropped=3, longest=50))):
        dropped = str(nothing_left(found, limit, RECORDS))
        assert "all 3 records are too long for 20 tokens" in dropped
        assert "use a sequence_length of up to 49, or" in dropped


def test_vocabularies_of_up_to_65536_tokens_have_two_bytes_a_token() -> None:
    assert [token_dtype(size) for size in (1, 65536, 65537)] == [np.uint16, np.uint16, np.uint32]


class Two:
    """Encoder of two documents; the second batch tells the losses of its document."""

    vocab_size = 300
    columns = {"weights": np.bool_}

    def encode(self, pieces: Any, _reject: Any) -> Any:
        yield self.batch([[1, 2, 0], [0]], [], [0, 2])
        yield self.batch([], [], [])
        yield self.batch([[299, 0]], [4], [3])

    def batch(self, ids: list[list[int]], lost: list[int], numbers: list[int]) -> Any:
        columns = {"weights": [np.ones(len(one), dtype=np.bool_) for one in ids]}
        arrays = [np.asarray(one, dtype=np.uint32) for one in ids]
        tally = Tally(records=len(ids))
        return SimpleNamespace(
            ids=arrays, lost=lost, numbers=numbers, columns=columns, tally=tally, labels=("x",), characters=5
        )


def test_a_shard_holds_tokens_lengths_and_losses_of_its_documents(tmp_path: Path) -> None:
    shard, read = Shard("000000-a", (), 15), list[int]()
    encoder: Any = Two()
    write_shard(encoder, shard, "error", tmp_path, read.append)
    finished = read_shard(shard, tmp_path, encoder.columns)
    assert read == [5, 5, 5]
    assert (finished.tokens.tolist(), str(finished.tokens.dtype)) == ([1, 2, 0, 0, 299, 0], "uint16")
    assert finished.lengths.tolist() == [3, 1, 2]
    assert finished.lost.tolist() == [0, 0, 4]
    assert finished.numbers.tolist() == [0, 2, 3]
    assert finished.records == 3
    assert finished.columns["weights"].tolist() == [True] * 6
    assert finished.tally == Tally(records=3)
    assert (finished.facts["skipped"], finished.facts["first_skipped"], finished.facts["labels"]) == (0, "", ["x"])


def test_skipped_records_are_counted_and_the_first_is_kept() -> None:
    skips, file = Skips(), SourceFile("a.jsonl", "jsonl")
    skips(Place(file, 7), "is bad")
    skips(Place(file, 9), "is worse")
    assert (skips.count, skips.first) == (2, "a.jsonl:7 is bad")


def test_files_are_cut_into_ranges_and_small_files_share_a_shard(lines: Piece) -> None:
    def ranges(*files: Piece, limit: int) -> list[tuple[int, list[tuple[int, int | None]]]]:
        return [(one.size, [(p.begin, p.end) for p in one.pieces]) for one in plan_shards(files, limit)]

    assert ranges(lines, limit=100) == [(100, [(0, None)])]
    assert ranges(lines, limit=50) == [(50, [(0, 50)]), (50, [(50, None)])]
    assert ranges(lines, limit=40) == [(40, [(0, 40)]), (40, [(40, 80)]), (20, [(80, None)])]
    assert ranges(lines, lines, limit=150) == [(200, [(0, None), (0, None)])]
    assert ranges(lines, lines, limit=201) == [(200, [(0, None), (0, None)])]
    assert ranges(lines, lines, lines, limit=200) == [(200, [(0, None)] * 2), (100, [(0, None)])]
    names = [one.name for one in plan_shards([lines, lines], 50)]
    assert [name.split("-")[0] for name in names] == ["000000", "000001", "000002", "000003"]
    assert len({name.split("-")[1] for name in names}) == 4
    assert plan_shards([], 50) == []


def test_a_place_counts_lines_from_1_or_from_a_byte_on(lines: Piece) -> None:
    assert str(Place(lines.file)) == "a.jsonl"
    assert str(Place(lines.file, 3)) == "a.jsonl:3"
    assert Place(lines.file, 3).exact() == "a.jsonl:3"
    assert str(Place(lines.file, 3, " row ")) == "a.jsonl row 3"
    assert str(Place(lines.file, 1, begin=1000)) == "a.jsonl, line 1 after byte 1,000,"
    # The first line at or after a byte: a line begins at each ten.
    assert [Place(lines.file, 1, begin=begin).exact() for begin in (1, 9, 10, 11, 20, 21)] == [
        "a.jsonl:2", "a.jsonl:2", "a.jsonl:2", "a.jsonl:3", "a.jsonl:3", "a.jsonl:4",
    ]  # fmt: skip
    assert Place(lines.file, 2, begin=20).exact() == "a.jsonl:4"


@pytest.mark.parametrize(("batch", "options"), [(10, "use 6 or 12, or"), (5, "use 6, or"), (7, "use 6 or 12, or")])
def test_batches_that_divide_are_named(batch: int, options: str) -> None:
    with pytest.raises(DataError, match=f"it must be a multiple of 6; {options} another microbatch size"):
        Layout.of(DataContext(0, batch, 3, Path("absent"), rank=0, ranks=2))
    layout = Layout.of(DataContext(0, 12, 3, Path("absent"), rank=1, ranks=2))
    assert (layout, layout.share) == (Layout(12, 3, 1, 2), 6)


def test_windows_are_whole_batches_and_at_most_an_epoch() -> None:
    assert _window(None, 10, 4) == 8
    assert _window(8, 10, 4) == 8
    assert _window(None, 1 << 20, 4) % 4 == 0
    for wanted, samples, options in ((6, 100, "use 4 or 8$"), (2, 100, "use 4$"), (9, 10, "use 8$"), (5, 3, "use 0$")):
        with pytest.raises(DataError, match=options):
            _window(wanted, samples, 4)
    with pytest.raises(DataError, match=r"12 samples are more than the 10 of an epoch.*use at most 8$"):
        _window(12, 10, 4)


def feistel(size: int, key: str, index: int) -> int:
    """The permuted value of an index, in whole numbers of any size."""
    half: int = 1
    while 1 << 2 * half < size:
        half += 1
    low, words = (1 << half) - 1, hashlib.blake2b(key.encode(), digest_size=64).digest()
    keys = [int.from_bytes(words[i : i + 8], "little") for i in range(0, 64, 8)]
    value = index
    while True:
        left, right = value >> half, value & low
        for one in keys:
            mixed = right ^ one
            for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
                mixed = ((mixed ^ (mixed >> shift)) * factor) % (1 << 64)
            left, right = right, left ^ ((mixed ^ (mixed >> 31)) & low)
        value = (left << half) | right
        if value < size:
            return value


def test_permutations_are_the_same_on_every_machine() -> None:
    assert Permutation(5, "seed 0 epoch 0")(np.arange(5)).tolist() == [2, 3, 1, 0, 4]
    for size in (1, 2, 4, 5, 16, 17, 100):
        found = Permutation(size, f"key {size}")(np.arange(size)).tolist()
        assert found == [feistel(size, f"key {size}", index) for index in range(size)]
        assert sorted(found) == list(range(size))
    largest = [[0, 2**62 - 1]]
    assert Permutation(2**62, "a")(np.asarray(largest)).tolist() == [
        [feistel(2**62, "a", index) for index in largest[0]]
    ]
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match="not from 0 to 4, the indices of the permutation"):
            Permutation(5, "a")(np.asarray([0, wrong]))


def test_epochs_of_an_order_have_their_own_permutations() -> None:
    order = SampleOrder(5, 7, shuffle=True)
    epochs = [Permutation(5, f"seed 7 epoch {epoch}")(np.arange(5)).tolist() for epoch in range(3)]
    assert order.take(0, 15).tolist() == [place for epoch in epochs for place in epoch]
    assert order.take(3, 4).tolist() == epochs[0][3:] + epochs[1][:2]
    assert SampleOrder(5, 7, shuffle=False).take(3, 4).tolist() == [3, 4, 0, 1]


class Lengths:
    """Corpus whose sample i has the i-th length."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)

    def documents_of(self, samples: Any) -> Any:
        return samples

    def positions_of(self, documents: Any) -> Any:
        return self.lengths[documents]


def test_packs_of_a_window_are_sorted_and_cross_epochs() -> None:
    corpus: Any = Lengths(9, 1, 8, 2, 7, 3, 6)
    order = WindowOrder(SampleOrder(7, 0, shuffle=False), corpus, 100, 4, 2)
    # Windows of four and two samples, and a pack across the end of the epoch, of sample 6 and the next epoch's first.
    assert [order(2 * pack).tolist() for pack in range(4)] == [[1, 3], [2, 0], [5, 4], [6, 0]]
    # The next epoch goes on after its first sample.
    assert [order(8 + 2 * pack).tolist() for pack in range(3)] == [[1, 3], [4, 2], [5, 6]]
    assert [order.holds_a_beginning(consumed) for consumed in range(9)] == [
        True, False, False, False, True, False, True, False, False,
    ]  # fmt: skip
    assert order.holds_a_beginning(14)
    assert order.holds_a_beginning(12)
    # Samples that are longer than the longest keep their order.
    cut = WindowOrder(SampleOrder(7, 0, shuffle=False), corpus, 2, 4, 2)
    assert [cut(2 * pack).tolist() for pack in range(2)] == [[1, 0], [2, 3]]
    assert cut.of_sizes(2, 2)(0).tolist() == [1, 0]
    assert cut.of_sizes(2, 2).window == 2


@pytest.mark.parametrize("seed", range(3))
def test_packs_across_the_ends_of_epochs_leave_out_no_sample_and_repeat_none(seed: int) -> None:
    corpus: Any = Lengths(9, 1, 8, 2, 7, 3, 6)
    order = WindowOrder(SampleOrder(7, seed, shuffle=True), corpus, 100, 4, 2)
    packs = [order(2 * pack).tolist() for pack in range(14)]
    assert all(len(set(pack)) == 2 for pack in packs)
    for end in range(1, 15):
        uses = np.bincount([sample for pack in packs[:end] for sample in pack], minlength=7)
        assert uses.max() - uses.min() <= 1


def corpus_of(*lengths: int, **fields: Any) -> Corpus:
    """Corpus of documents of some lengths, whose token i is i."""
    starts = np.cumsum([0, *lengths])
    return Corpus(np.arange(starts[-1]), starts, 99, "words", 1.5, "digest", None, **fields)


def test_a_corpus_predicts_and_learns_all_tokens_unless_it_says_otherwise() -> None:
    corpus = corpus_of(3, 5)
    assert (corpus.predicts, corpus.ends, corpus.skipped, corpus.learned, corpus.num_classes) == (
        True, Ends(1, False, False), 0, 0, 0,
    )  # fmt: skip
    assert (corpus.weights, corpus.scales, corpus.labels, corpus.lost, corpus.limit) == (None,) * 5
    assert (Ends(), WHOLE) == (Ends(0, False, False),) * 2
    assert (corpus.texts, corpus.documents_per_sample, corpus.samples) == ((), 1, 2)
    assert corpus.documents_of(np.asarray([1, 0])).tolist() == [1, 0]
    assert corpus.positions_of(np.asarray([1, 0])).tolist() == [4, 2]
    assert corpus_of(3, 5, ends=WHOLE).positions_of(np.asarray([1, 0])).tolist() == [5, 3]


def test_samples_of_several_documents_are_consecutive() -> None:
    corpus = corpus_of(1, 2, 3, 4, 5, 6, encoding=Encoding("pairs", {}, texts=("query", "positive", "negative")))
    assert (corpus.documents_per_sample, corpus.samples) == (3, 2)
    assert corpus.documents_of(np.asarray([1, 0, 1])).tolist() == [3, 4, 5, 0, 1, 2, 3, 4, 5]


def test_tokens_lost_in_preparation_and_in_the_stream_add_up() -> None:
    both = np.asarray([0, 1, 2])
    assert corpus_of(3, 5, 8).lost_of(both).tolist() == [0, 0, 0]
    lost = np.asarray([7, 0, 2])
    assert corpus_of(3, 5, 8, lost=lost).lost_of(both).tolist() == [7, 0, 2]
    assert corpus_of(3, 5, 8, limit=Limit(4)).lost_of(both).tolist() == [0, 1, 4]
    assert corpus_of(3, 5, 8, limit=Limit(4), lost=lost).lost_of(both[::-1]).tolist() == [6, 1, 7]
    assert corpus_of(3, 5, 8, limit=Limit(5)).lost_of(both).tolist() == [0, 0, 3]


def test_losses_are_counted_by_the_preparation_or_by_the_stream() -> None:
    tally = Tally(records=100, cut=2, longest=50, dropped=1)
    uncut = Tally(records=100, longest=50, dropped=1)
    assert corpus_of(3, 5, 8, tally=tally, limit=Limit(4)).losses() is tally
    assert corpus_of(3, 5, 8, tally=uncut).losses() is uncut
    assert corpus_of(3, 5, 8, tally=uncut, limit=Limit(8)).losses() is uncut
    assert corpus_of(3, 5, 8, tally=uncut, limit=Limit(4)).losses() == Tally(records=3, cut=2, longest=8, dropped=1)


def test_a_corpus_says_its_sizes() -> None:
    sizes = {"vocab_size": 99, "tokens": 8, "documents": 2, "tokenizer": "words", "skipped": 3}
    plain = {"eos_token_id": 7, "unigram_entropy": 1.5}
    assert facts_of(corpus_of(3, 5, skipped=3)) == {**sizes, **plain}
    assert facts_of(corpus_of(3, 5, skipped=3, limit=Limit(4))) == {**sizes, **plain, "cut_documents": 1, "longest": 5}
    assert facts_of(corpus_of(3, 5, skipped=3, limit=Limit(5))) == {**sizes, **plain, "cut_documents": 0}
    tally = Tally(records=9, longest=20, cut=2, incomplete=1, dropped=4, stops={"a": 2, "b": 3})
    counted = {"cut_documents": 2, "longest": 20, "incomplete": 1, "dropped": 4}
    weights, stop = np.ones(8, dtype=np.bool_), {"stop_learned": 5, "stop_token_ids": [5, 6]}
    learned: dict[str, Any] = {"weights": weights, "learned": 6, "stop_token_ids": (5, 6), "tally": tally}
    assert facts_of(corpus_of(3, 5, skipped=3, limit=Limit(9), **learned)) == {
        **sizes, **counted, "learned_tokens": 6, **stop,
    }  # fmt: skip
    pairs = Encoding("pairs", {}, texts=("a", "b"), targets=False)
    assert facts_of(corpus_of(3, 5, skipped=3, encoding=pairs)) == {**sizes, "texts": ["a", "b"], "texts_per_sample": 2}
    labels = np.zeros(8, dtype=np.int32)
    classes = {**sizes, "num_classes": 2}
    assert facts_of(corpus_of(3, 5, skipped=3, labels=labels, num_classes=2)) == classes
    named = corpus_of(3, 5, skipped=3, labels=labels, num_classes=2, label_names=("n", "y"))
    assert facts_of(named) == {**classes, "labels": ["n", "y"]}


def test_files_that_hold_a_document_each_are_counted_as_documents() -> None:
    texts, lines = SourceFile("a.txt", "text"), SourceFile("a.jsonl", "jsonl")
    assert [_amount(files) for files in ([texts], [texts] * 1234, [lines], [texts, lines])] == [
        "1 document", "1,234 documents", "1 file", "2 files",
    ]  # fmt: skip


class Packs:
    """Source of packs with the number of consumed samples."""

    def pack_at(self, consumed: int) -> Any:
        return [{"n": np.asarray([consumed])}]


def test_streams_continue_at_a_state_of_the_same_data_only() -> None:
    def opened(identity: str = "a") -> PackStream:
        return PackStream(Packs(), 4, 0, identity, "x and y")

    stream = opened()
    read = [int(stream.next_pack()[0]["n"][0]) for _ in range(3)]
    state = stream.state()
    assert (read, state["consumed"], len(str(state["fingerprint"])), set(state)) == (
        [0, 4, 8], 12, 16, {"consumed", "fingerprint", "tokenisation"},
    )  # fmt: skip
    again = opened()
    again.load_state(state)
    assert int(again.next_pack()[0]["n"][0]) == 12
    again.load_state({**state, "consumed": 0})
    assert int(again.next_pack()[0]["n"][0]) == 0
    for wrong in (-1, None, 1.5):
        with pytest.raises(DataError, match=f"is damaged: consumed is {wrong}"):
            again.load_state({**state, "consumed": wrong})
    with pytest.raises(DataError, match=r"now it is \w+\); x and y must stay unchanged"):
        opened("b").load_state(state)
    with pytest.raises(DataError, match="another version of d9d-data saved it"):
        opened("b").load_state({**state, "tokenisation": -1})
    with pytest.raises(DataError, match="another version of d9d-data saved it"):
        opened("b").load_state({"consumed": 0, "fingerprint": "x"})


@pytest.mark.parametrize(
    ("length", "lost"),
    [(3, [[7], [0], [0, 2], [2]]), (4, [[7, 0], [0], [2], [2]]), (8, [[7, 0], [2]]), (16, [[7, 0, 2]])],
)
def test_a_packed_sample_tells_the_losses_of_all_documents_that_it_has_tokens_of(
    length: int, lost: list[list[int]]
) -> None:
    corpus = corpus_of(3, 5, 8, lost=np.asarray([7, 0, 2]))
    samples = np.arange(len(lost))
    assert TextSamples(corpus, length).lost(samples) == lost
    assert TextSamples(corpus, length).lost(samples[::-1]) == lost[::-1]

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.config import DocumentsConfig
from d9d_data.corpus.identity import FORMAT
from d9d_data.corpus.prepare import Corpus
from d9d_data.order.samples import SampleOrder
from d9d_data.stream.documents import DocumentStream, build_documents
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

LONGEST = 16


def numbered(lengths: list[int]) -> Corpus:
    """Document i has ``lengths[i]`` tokens, the first of which is i; 0 ends it."""
    rows = [[number, *[7] * (length - 2), 0] for number, length in enumerate(lengths)]
    tokens = np.asarray([token for row in rows for token in row], dtype=np.uint32)
    starts = np.cumsum([0, *lengths])
    return Corpus(tokens, starts, 1000, "numbers", 1.0, f"digest {lengths}", Path("absent"))


def stream(lengths: list[int], window: int | None = None, shuffle: bool = True, **values: int) -> DocumentStream:
    sizes = {"seed": 0, "batch_size": 4, "microbatch_size": 1} | values
    context = DataContext(cache_dir=Path("absent"), **sizes)  # type: ignore[arg-type]
    config = DocumentsConfig(
        sources=("unused",), sequence_length=LONGEST, bucket_window=window, pad_multiple=4, shuffle=shuffle
    )
    return DocumentStream(config, context, numbered(lengths))


def numbers_of(pack: Any) -> list[int]:
    return [int(first) for microbatch in pack for first in microbatch["tokens"][:, 0]]


lengths_of_documents = st.lists(st.integers(2, 40), min_size=1, max_size=30)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[int, int]:
    """Ranks and microbatch size that divide a batch of 12."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 12]))
    return ranks, draw(st.sampled_from([size for size in (1, 2, 3, 4, 6, 12) if 12 // ranks % size == 0]))


@pytest.mark.thorough
@settings(max_examples=60)
@given(lengths_of_documents, st.integers(0, 5), st.integers(1, 3), st.lists(layouts(), min_size=1, max_size=6))
def test_any_layout_and_any_resume_point_give_the_same_packs(
    lengths: list[int], seed: int, batches: int, per_step: list[tuple[int, int]]
) -> None:
    lengths = (lengths * 12)[: max(12, len(lengths))]
    window = 12 * min(batches, max(1, len(lengths) // 12))
    uninterrupted = stream(lengths, window, seed=seed, batch_size=12, microbatch_size=12)
    state: Any = uninterrupted.state()
    for ranks, microbatch_size in per_step:  # every step runs in another layout, resumed from the step before
        expected = numbers_of(uninterrupted.next_pack())
        seen: list[int] = []
        states = []
        for rank in range(ranks):
            reader = stream(
                lengths, window, seed=seed, batch_size=12, microbatch_size=microbatch_size, rank=rank, ranks=ranks
            )
            reader.load_state(state)
            taken = reader.next_pack()
            assert [len(microbatch["tokens"]) for microbatch in taken] == [microbatch_size] * (
                12 // ranks // microbatch_size
            )
            seen += numbers_of(taken)
            states.append(reader.state())
        assert Counter(seen) == Counter(expected)
        assert all(other == states[0] for other in states)
        state = states[0]


@settings(max_examples=60)
@given(lengths_of_documents, st.integers(0, 5), st.integers(1, 6), st.integers(1, 5), st.booleans())
def test_windows_hold_what_the_order_holds_there(
    lengths: list[int], seed: int, batch_size: int, batches: int, shuffle: bool
) -> None:
    assume(batch_size * batches <= len(lengths))
    window = batch_size * batches
    reader = stream(lengths, window, shuffle, seed=seed, batch_size=batch_size)
    packs = [numbers_of(reader.next_pack()) for _ in range(batches)]
    expected = SampleOrder(len(lengths), seed, shuffle).take(0, window).tolist()
    assert Counter(sample for pack in packs for sample in pack) == Counter(expected)
    cut = [[min(lengths[sample], LONGEST + 1) for sample in pack] for pack in packs]
    assert all(pack == sorted(pack) for pack in cut)
    by_length = sorted(cut)
    assert all(a[-1] <= b[0] for a, b in itertools.pairwise(by_length))  # packs overlap nowhere


@pytest.mark.thorough
@settings(max_examples=100)
@given(lengths_of_documents, st.integers(0, 3), st.integers(1, 12), st.integers(1, 3) | st.none(), st.booleans())
def test_after_every_step_no_document_came_more_than_once_more_than_another(
    lengths: list[int], seed: int, batch_size: int, batches: int | None, shuffle: bool
) -> None:
    batch_size = min(batch_size, len(lengths))
    window = None if batches is None else min(batches, len(lengths) // batch_size) * batch_size
    reader = stream(lengths, window, shuffle, seed=seed, batch_size=batch_size)
    seen = Counter(dict.fromkeys(range(len(lengths)), 0))
    for _ in range(4 * len(lengths) // batch_size + 1):
        pack = numbers_of(reader.next_pack())
        seen.update(pack)
        assert max(seen.values()) - min(seen.values()) <= (1 if len(lengths) >= 2 * batch_size else 2)
        assert len(set(pack)) == batch_size or len(lengths) < 2 * batch_size


@pytest.mark.parametrize("shuffle", [True, False])
def test_four_epochs_hold_each_document_four_times(shuffle: bool) -> None:
    reader = stream([2 + 5 * n % 13 for n in range(29)], shuffle=shuffle)
    seen = Counter(number for _ in range(29) for number in numbers_of(reader.next_pack()))
    assert seen == dict.fromkeys(range(29), 4)


def test_seeds_and_epochs_give_different_orders() -> None:
    lengths = [2 + i % 9 for i in range(24)]
    orders = set()
    for seed in range(3):
        reader = stream(lengths, 24, seed=seed)
        orders |= {tuple(n for _ in range(6) for n in numbers_of(reader.next_pack())) for _ in range(2)}
    assert len(orders) == 6


def test_packs_are_shuffled_within_a_window_unless_told_otherwise() -> None:
    def longest(shuffle: bool) -> list[int]:
        reader = stream(list(range(2, 18)), 16, shuffle, batch_size=2)
        return [max(numbers_of(reader.next_pack())) for _ in range(8)]

    assert longest(shuffle=False) == sorted(longest(shuffle=True)) != longest(shuffle=True)


def test_ranks_get_microbatches_of_about_one_length() -> None:
    lengths = list(range(2, 14))
    packs = [stream(lengths, 12, batch_size=12, microbatch_size=2, rank=r, ranks=3).next_pack() for r in range(3)]
    widths = [[microbatch["tokens"].shape[1] for microbatch in pack] for pack in packs]
    assert widths == [[4, 12], [8, 12], [8, 12]]  # 1 and 4 positions, 2 and 5, 3 and 6; 7 and 10, ...


def test_bucketing_saves_padding() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, LONGEST + 2, 240).tolist()

    def padding(window: int) -> float:
        reader = stream(lengths, window, batch_size=8, microbatch_size=4)
        documents = [mb["documents"] for _ in range(30) for mb in reader.next_pack()]
        return float(sum(d.sum() for d in documents) / sum(d.numel() for d in documents))

    assert padding(240) < padding(8) / 2


def test_state_is_plain_json_and_says_what_formed_the_packs() -> None:
    reader = stream([3] * 10)
    reader.next_pack()
    state = reader.state()
    assert state == json.loads(json.dumps(state))
    sizes = {"batch_size": 4, "bucket_window": 8}
    assert state == {"consumed": 4, "fingerprint": state["fingerprint"], "tokenisation": FORMAT, **sizes}


@settings(max_examples=60)
@given(lengths_of_documents, st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4, 6]), st.integers(0, 9))
def test_other_batch_sizes_continue_exactly_or_are_refused(
    lengths: list[int], batch_size: int, other: int, packs: int
) -> None:
    assume(max(batch_size, other) <= len(lengths))
    before, after = stream(lengths, batch_size=batch_size), stream(lengths, batch_size=other)
    seen = Counter(dict.fromkeys(range(len(lengths)), 0))
    seen.update(n for _ in range(packs) for n in numbers_of(before.next_pack()))
    state, start = before.state(), after.state()
    refusal = ""
    try:
        after.load_state(state)
    except DataError as error:
        refusal = str(error)
    if refusal:
        assert batch_size != other
        assert state["consumed"] % len(lengths) or state["consumed"] % other
        assert f"after {state['consumed']} samples with a batch size of {batch_size}" in refusal
        assert after.state() == start
        return
    spread = 1 if len(lengths) >= 2 * max(batch_size, other) else 2
    for _ in range(3 * len(lengths) // other + 1):
        seen.update(numbers_of(after.next_pack()))
        assert max(seen.values()) - min(seen.values()) <= spread


def test_sizes_may_change_where_a_window_ends_within_an_epoch() -> None:
    before, after = stream([3] * 40, 8, batch_size=4), stream([3] * 40, 16, batch_size=8)
    for _ in range(4):
        before.next_pack()
    after.load_state(before.state())
    before.next_pack()
    with pytest.raises(DataError, match="after 20 samples .* be repeated"):
        after.load_state(before.state())


def test_states_of_other_data_and_damaged_ones_are_refused() -> None:
    reader = stream([3] * 10)
    with pytest.raises(DataError, match="belongs to other data"):
        reader.load_state(stream([3] * 11).state())
    with pytest.raises(DataError, match="damaged: consumed is None"):
        reader.load_state({"fingerprint": reader.state()["fingerprint"]})
    with pytest.raises(DataError, match="damaged: batch_size is None"):
        reader.load_state({"fingerprint": reader.state()["fingerprint"], "consumed": 0})


@pytest.mark.parametrize(
    ("window", "message"),
    [
        (6, "6 samples cannot be cut into batches of 4; use 4 or 8$"),
        (3, "3 samples cannot be cut into batches of 4; use 4$"),
        (10, "10 samples cannot be cut into batches of 4; use 8$"),
        (12, "12 samples are more than the 10 of an epoch, .*; use at most 8$"),
    ],
)
def test_windows_that_cannot_be_are_refused_with_ones_that_can(window: int, message: str) -> None:
    with pytest.raises(DataError, match=rf"^data\.bucket_window: {message}"):
        stream([3] * 10, window)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(
        DataError, match=r"^batch\.size: a batch of 6 .* train split has only 2; use at most 2, or more data$"
    ):
        stream([2, 3], batch_size=6)


@pytest.mark.parametrize(("length", "options"), [(100, "96 or 104"), (5, "8")])
def test_sequence_length_must_be_a_multiple_of_the_padding(length: int, options: str) -> None:
    with pytest.raises(
        ValidationError, match=f"not a multiple of pad_multiple 8; use a sequence_length of {options}, or"
    ):
        DocumentsConfig(sources=("a",), sequence_length=length)


def test_samples_need_not_be_padded_to_a_multiple() -> None:
    assert DocumentsConfig(sources=("a",), sequence_length=7, pad_multiple=1).pad_multiple == 1
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        DocumentsConfig(sources=("a",), sequence_length=7, pad_multiple=0)


# --- files


def open_documents(tmp_path: Path, *sources: Path, **values: Any) -> DocumentStream:
    config = DocumentsConfig.model_validate(
        {"sources": [str(source) for source in sources], "sequence_length": 16, "shuffle": False} | values
    )
    return build_documents(config, DataContext(seed=0, batch_size=1, microbatch_size=1, cache_dir=tmp_path / "cache"))


def texts(reader: DocumentStream) -> list[str]:
    tokens, starts = reader._corpus.tokens.tolist(), reader._corpus.starts.tolist()
    return [bytes(tokens[a : b - 1]).decode() for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("count", [5, 6])
def test_a_missing_path_is_told_what_its_folder_holds(tmp_path: Path, count: int) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.txt").write_text("x")
    held = "0.txt, 1.txt, 2.txt, 3.txt, 4.txt" + (", ..." if count > 5 else "")
    with pytest.raises(DataError, match=rf"holds: {re.escape(held)}(?!, 5)"):
        open_documents(tmp_path, folder / "other.txt")


@pytest.mark.parametrize(("batch_size", "window"), [(0, 4), (-4, 4), (3, 4), (8, 4), (400, 400)])
def test_a_saved_size_that_no_run_can_have_had_is_refused(batch_size: int, window: int) -> None:
    reader = stream([8] * 16, window=8)
    with pytest.raises(DataError, match=f"damaged: batch_size is {batch_size} and bucket_window {window};"):
        reader.load_state(reader.state() | {"batch_size": batch_size, "bucket_window": window})


def test_files_and_lines_are_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n")
    lines = [{"text": "thrée ", "id": 7}, {"text": "  "}, {"text": "four " * 9}]
    (tmp_path / "b.jsonl").write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines))
    reader = open_documents(tmp_path, tmp_path / "a.txt", tmp_path / "b.jsonl", bucket_window=1)
    assert texts(reader) == ["one\ntwo\n", "thrée ", "four " * 9]
    facts = reader.facts
    assert (facts["documents"], facts["samples"], facts["cut_documents"], facts["sequence_length"]) == (3, 3, 1, 16)
    assert reader.next_pack()[0]["tokens"].tolist() == [list(b"one\ntwo\n")]


def test_a_document_is_cut_if_it_has_more_tokens_than_a_sample_and_its_labels_take(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in (14, 15, 16, 17, 18)))
    reader = open_documents(tmp_path, tmp_path / "a.jsonl")  # each gets an end-of-text token
    assert reader.facts["cut_documents"] == 2


def test_lines_that_change_are_other_data(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    before = open_documents(tmp_path, file)
    file.write_text('{"text": "one"}\n{"text": "2"}\n')
    after = open_documents(tmp_path, file)
    assert texts(after) == ["one", "2"]
    with pytest.raises(DataError, match="belongs to other data"):
        after.load_state(before.state())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{text}", r"a\.jsonl:2 is not JSON \(.*\); write one object per line"),
        ('{"body": "x", "id": 1}', r"a\.jsonl:2 has no text in a field 'text' \(it has body, id\)"),
        ("{}", r"a\.jsonl:2 has no text in a field 'text' \(it has none\)"),
        ('["x"]', r"a\.jsonl:2 has no fields \(it is a list\)"),
        ('{"text": null}', r"a\.jsonl:2 has no text in a field 'text' \(it has text\)"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"^data\.sources: .*{message}"):
        open_documents(tmp_path, tmp_path / "a.jsonl")


@pytest.mark.parametrize(("ranks", "size"), [(1, 4), (2, 1), (2, 2), (4, 1)])
def test_the_share_of_padding_is_that_of_the_first_window(ranks: int, size: int) -> None:
    lengths = [2 + 7 * number % 23 for number in range(24)]
    used = total = 0
    facts = []
    for rank in range(ranks):
        reader = stream(lengths, window=8, rank=rank, ranks=ranks, microbatch_size=size)
        facts.append(reader.facts["unused_positions"])
        for microbatch in [*reader.next_pack(), *reader.next_pack()]:
            used, total = used + int(microbatch["lengths"].sum()), total + microbatch["tokens"].numel()
    assert facts == [pytest.approx(1 - used / total)] * ranks

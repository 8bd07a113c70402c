from __future__ import annotations

import numpy as np
from d9d_data.stream.packing import NO_TARGET, pack, sample_count
from hypothesis import given
from hypothesis import strategies as st

END = 99


def row(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.asarray([token for document in documents for token in [*document, END]], dtype=np.uint16)
    starts = np.cumsum([0, *(len(document) + 1 for document in documents)])
    return tokens, starts


def test_sample_across_documents() -> None:
    tokens, starts = row([[1, 2, 3], [4], [5, 6]])  # 1 2 3 E 4 E 5 6 E
    sample = pack(tokens, starts, np.asarray([0]), 8)
    assert sample["tokens"].tolist() == [[1, 2, 3, END, 4, END, 5, 6]]
    assert sample["targets"].tolist() == [[2, 3, END, NO_TARGET, END, NO_TARGET, 6, END]]
    assert sample["positions"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1]]
    assert sample["documents"].tolist() == [[0, 0, 0, 0, 1, 1, 2, 2]]


def test_document_that_began_earlier_starts_again_at_position_and_number_zero() -> None:
    tokens, starts = row([[1, 2, 3, 4, 5], [6, 7, 8]])  # 1 2 3 | 4 5 E | 6 7 8 | E
    samples = pack(tokens, starts, np.asarray([1, 2]), 3)
    assert samples["tokens"].tolist() == [[4, 5, END], [6, 7, 8]]
    assert samples["targets"].tolist() == [[5, END, NO_TARGET], [7, 8, END]]
    assert samples["positions"].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert samples["documents"].tolist() == [[0, 0, 0], [0, 0, 0]]


def test_all_arrays_are_int64() -> None:
    tokens, starts = row([[1, 2, 3]])
    assert {values.dtype for values in pack(tokens, starts, np.asarray([0]), 2).values()} == {np.dtype(np.int64)}


def test_the_last_position_needs_a_token_after_it() -> None:
    assert [sample_count(tokens, 4) for tokens in (0, 1, 4, 5, 8, 9)] == [0, 0, 0, 1, 1, 2]


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=9), min_size=1, max_size=8), st.integers(1, 12))
def test_packing_agrees_with_counting_token_by_token(documents: list[list[int]], length: int) -> None:
    tokens, starts = row(documents)
    count = sample_count(len(tokens), length)
    packed = pack(tokens, starts, np.arange(count), length)
    document_of = [d for d, document in enumerate(documents) for _ in [*document, END]]
    for sample in range(count):
        seen: list[int] = []
        position = 0
        for s in range(length):
            place = sample * length + s
            position = 0 if s == 0 or document_of[place] != document_of[place - 1] else position + 1
            if document_of[place] not in seen:
                seen.append(document_of[place])
            same = document_of[place] == document_of[place + 1]
            assert packed["tokens"][sample, s] == tokens[place]
            assert packed["targets"][sample, s] == (tokens[place + 1] if same else NO_TARGET)
            assert packed["positions"][sample, s] == position
            assert packed["documents"][sample, s] == len(seen) - 1

from __future__ import annotations

import numpy as np
from d9d_data.stream.packing import NO_TARGET
from d9d_data.stream.padding import pad
from hypothesis import given, settings
from hypothesis import strategies as st

END = 99


def row(documents: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.asarray([token for document in documents for token in [*document, END]], dtype=np.uint16)
    return tokens, np.cumsum([0, *(len(document) + 1 for document in documents)])


def test_samples_are_padded_to_the_longest_of_them() -> None:
    tokens, starts = row([[1, 2, 3], [4], [5, 6]])
    padded = pad(tokens, starts, np.asarray([1, 0]), 8, 1)
    assert padded["tokens"].tolist() == [[4, END, END], [1, 2, 3]]
    assert padded["targets"].tolist() == [[END, NO_TARGET, NO_TARGET], [2, 3, END]]
    assert padded["positions"].tolist() == [[0, 0, 1], [0, 1, 2]]
    assert padded["documents"].tolist() == [[0, 1, 1], [0, 0, 0]]


def test_long_documents_are_cut_and_the_last_position_predicts_what_follows() -> None:
    tokens, starts = row([[1, 2, 3, 4, 5], [6]])
    assert pad(tokens, starts, np.asarray([0]), 4, 4)["targets"].tolist() == [[2, 3, 4, 5]]
    assert pad(tokens, starts, np.asarray([0]), 5, 5)["targets"].tolist() == [[2, 3, 4, 5, END]]


def test_document_without_tokens_is_a_sample_without_targets() -> None:
    tokens, starts = row([[1, 2], []])
    padded = pad(tokens, starts, np.asarray([1]), 4, 2)
    assert padded["tokens"].tolist() == [[END, END]]
    assert padded["targets"].tolist() == [[NO_TARGET, NO_TARGET]]
    assert padded["documents"].tolist() == [[0, 1]]


@settings(max_examples=60)
@given(st.lists(st.lists(st.integers(0, 50), max_size=9), min_size=1, max_size=8), st.integers(1, 4), st.integers(1, 3))
def test_padding_agrees_with_counting_token_by_token(documents: list[list[int]], multiple: int, times: int) -> None:
    length = multiple * times
    tokens, starts = row(documents)
    padded = pad(tokens, starts, np.arange(len(documents)), length, multiple)
    shape = padded["tokens"].shape
    assert {values.dtype for values in padded.values()} == {np.dtype(np.int64)}
    assert {name: values.shape for name, values in padded.items()} == dict.fromkeys(padded, shape) | {
        "lengths": shape[:1]
    }
    assert shape[1] % multiple == 0
    assert max(min(len(document), length) for document in documents) <= shape[1] <= length
    for sample, document in enumerate(documents):
        inputs, targets = document[:length], [*document, END][1 : length + 1]
        assert padded["lengths"][sample] == max(1, len(inputs))
        for s in range(shape[1]):
            real = s < max(1, len(inputs))
            assert padded["documents"][sample, s] == (0 if real else 1)
            assert padded["positions"][sample, s] == (s if real else s - max(1, len(inputs)))
            assert padded["tokens"][sample, s] == (inputs[s] if s < len(inputs) else END)
            assert padded["targets"][sample, s] == (targets[s] if s < len(targets) else NO_TARGET)

"""Blocks of one pass over the data, exactly: their order, fillers and sizes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from d9d_core.errors import DataError
from d9d_data.order.layout import Layout
from d9d_data.stream.one_pass import OnePassPacks, _block_size, _without_targets


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

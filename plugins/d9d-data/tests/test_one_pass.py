"""One pass over a dataset: rules of this plugin's formats. What holds for all is in test_suites.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from d9d_core.data import DataContext
from d9d_core.errors import DataError
from d9d_data.config import DocumentsConfig, TextConfig
from d9d_data.order.layout import Layout
from d9d_data.stream.bins import Pieces, next_fit, pack_bins
from d9d_data.stream.documents import build_documents
from d9d_data.stream.one_pass import OnePassPacks, OnePassStream, _block_size
from d9d_data.stream.text import build_text


def passed(directory: Path, config: Any, build: Any, batch: int = 4, micro: int = 1, **ranks: int) -> OnePassStream:
    context = DataContext(0, batch, micro, directory / "cache", one_pass=True, **ranks)
    stream = build(config, context)
    assert isinstance(stream, OnePassStream)
    return stream


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Texts of 4, 29, 3, ... bytes."""
    (tmp_path / "texts").mkdir()
    for index, length in enumerate([4, 29, 3, 12, 1, 7, 2]):
        (tmp_path / "texts" / f"{index}.txt").write_text("abcdefghij"[index] * length)
    return tmp_path / "texts"


def test_bins_are_filled_in_order_and_long_documents_are_cut(texts: Path, tmp_path: Path) -> None:
    config = TextConfig(sources=(str(texts),), tokenizer="bytes", sequence_length=16, packing="best_fit")
    stream = passed(tmp_path, config, build_text)
    microbatches = stream.next_pack()
    assert [int(microbatch["rows"][0]) for microbatch in microbatches] == [0, 1, 2, 5]
    assert [int(microbatch["lengths"][0]) for microbatch in microbatches] == [4, 16, 16, 9]
    assert (stream.facts["rows"], stream.facts["samples"], stream.facts["cut_documents"]) == (7, 4, 1)
    assert microbatches[1]["targets"].tolist() == [[ord("b")] * 16]
    assert microbatches[2]["documents"].tolist() == [[0] * 3 + [1] * 12 + [2]]
    fillers = stream.next_pack()
    assert {int(microbatch["rows"][0]) for microbatch in fillers} == {-1}
    assert {int(microbatch["targets"].max()) for microbatch in fillers} == {-100}


def test_a_document_of_one_token_keeps_its_place() -> None:
    pieces = Pieces(np.asarray([0, 3, 4]), np.asarray([2, 0, 3]))
    bins = next_fit(np.maximum(pieces.lengths, 1), 6)
    packed = pack_bins(np.arange(8), None, pieces, bins, np.asarray([0]), 6)
    assert packed["tokens"].tolist() == [[0, 1, 3, 4, 5, 6]]
    assert packed["targets"].tolist() == [[1, 2, -100, 5, 6, 7]]
    assert packed["documents"].tolist() == [[0, 0, 1, 2, 2, 2]]


def test_next_fit_of_nothing_has_no_bins() -> None:
    assert len(next_fit(np.asarray([], dtype=np.int64), 4)) == 0


def test_samples_are_sorted_inside_blocks(texts: Path, tmp_path: Path) -> None:
    config = DocumentsConfig(sources=(str(texts),), tokenizer="bytes", sequence_length=32, pad_multiple=1)
    wide = [microbatch["tokens"].shape[1] for microbatch in passed(tmp_path, config, build_documents, 64).next_pack()]
    assert wide[:7] == [1, 2, 3, 4, 7, 12, 29]
    assert set(wide[7:]) == {4}  # fillers
    unsorted = config.model_copy(update={"bucket_window": 1})
    narrow = passed(tmp_path, unsorted, build_documents, 64).next_pack()
    assert [int(microbatch["rows"][0]) for microbatch in narrow][:8] == [0, 1, 2, 3, 4, 5, 6, -1]


class Unsorted:
    def sizes(self, samples: Any) -> Any:
        return np.zeros(len(samples))

    def microbatch(self, samples: Any) -> Any:
        return {"rows": samples}


def test_ranks_without_whole_blocks_are_refused_with_sizes_that_fit() -> None:
    with pytest.raises(
        DataError, match=r"blocks of 16 .* a batch of 128 over 16 ranks gives 8 to each; use a batch of 256, or"
    ):
        _block_size(Layout(128, 2, 0, 16), None)
    assert _block_size(Layout(256, 2, 0, 16), None) == 16
    assert _block_size(Layout(128, 2, 0, 16), 2) == 2


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("microbatches", [8, 24, 64, 128, 200])
def test_up_to_eight_ranks_have_whole_blocks(microbatches: int, ranks: int) -> None:
    block = _block_size(Layout(3 * microbatches, 3, 0, ranks), None)
    packs = OnePassPacks(Unsorted(), 10, Layout(3 * microbatches, 3, 0, ranks), block)
    assert len(packs.pack_at(0)) == microbatches // ranks

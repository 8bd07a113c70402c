from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from d9d_data.corpus.npy_writer import NpyWriter


@pytest.mark.parametrize("lengths", [[], [0], [3], [1, 70_000, 5]])
def test_appended_pieces_are_one_array(tmp_path: Path, lengths: list[int]) -> None:
    pieces = [np.arange(n, dtype=np.int64) % 1000 for n in lengths]
    with NpyWriter(tmp_path / "a.npy", np.uint16) as writer:
        for piece in pieces:
            writer.append(piece)
    loaded = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert loaded.dtype == np.uint16
    assert loaded.tolist() == [value for piece in pieces for value in piece.tolist()]
    assert writer.length == sum(lengths)

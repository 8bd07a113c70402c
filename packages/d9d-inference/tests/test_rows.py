"""Rows of inference: their order, columns, and the thread that writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from d9d_core.errors import BuildError, NonFiniteError
from d9d_inference.config import JsonlWriterConfig
from d9d_inference.row_thread import KeptPack, RowThread, check_finite, joined_rows
from d9d_inference.writers.jsonl import JsonlWriter
from torch import Tensor


class Task:
    """Task whose rows have a number and a value."""

    columns = ("row", "value")

    def rows(self, kept: Mapping[str, Tensor]) -> Any:
        return {"row": kept["rows"].tolist(), "value": kept["x"].tolist()}

    def tally(self, rows: Any) -> int:
        return len(rows["row"])


def test_rows_are_in_order_of_their_numbers_and_without_fillers() -> None:
    kept = [
        {"rows": torch.tensor([4, -1, 2]), "x": torch.tensor([0.5, 9.0, 1.5])},
        {"rows": torch.tensor([-1]), "x": torch.tensor([9.0])},
        {"rows": torch.tensor([0, 3]), "x": torch.tensor([2.5, 3.5])},
    ]
    assert joined_rows(cast("Any", Task()), kept) == {"row": [0, 2, 3, 4], "value": [2.5, 1.5, 3.5, 0.5]}


@pytest.mark.parametrize("columns", [("value", "row"), ("row",), ("row", "value", "more")])
def test_a_task_whose_rows_are_not_as_declared_is_an_error(columns: tuple[str, ...]) -> None:
    task = Task()
    task.columns = columns  # type: ignore[assignment]
    with pytest.raises(BuildError, match="it declares"):
        joined_rows(cast("Any", task), [{"rows": torch.tensor([0]), "x": torch.tensor([1.0])}])


def test_columns_of_different_lengths_are_an_error() -> None:
    class Short(Task):
        def rows(self, kept: Mapping[str, Tensor]) -> Any:
            return {"row": [0, 1], "value": [1.0]}

    with pytest.raises(BuildError, match="each with one value per row"):
        joined_rows(cast("Any", Short()), [{"rows": torch.tensor([0, 1])}])


@pytest.mark.parametrize("value", [math.nan, math.inf, [1.0, math.nan], np.asarray([-math.inf]), np.float32(math.nan)])
def test_a_row_that_is_not_finite_is_named(value: object) -> None:
    check_finite({"row": [0, 1], "value": [1.0, "nan"]})
    check_finite({"row": [0, 1], "value": [[1.0, 2.0], np.asarray([3])]})
    with pytest.raises(NonFiniteError, match="row 7: 'value' has NaN or infinity"):
        check_finite({"row": [5, 7], "value": [1.0, value]})


@pytest.mark.parametrize("nonfinite", ["error", "keep"])
def test_rows_are_written_by_a_thread_whose_failure_comes_back(nonfinite: Any) -> None:
    written: list[tuple[Any, ...]] = []
    waited: list[str] = []
    store: Any = SimpleNamespace(write=lambda *given: written.append(given))
    copied: Any = SimpleNamespace(synchronize=lambda: waited.append("waited"))
    good = KeptPack(3, 1, [{"rows": torch.tensor([0]), "x": torch.tensor([1.0])}], copied)
    bad = KeptPack(4, 1, [{"rows": torch.tensor([1]), "x": torch.tensor([math.nan])}], None)
    with RowThread(cast("Any", Task()), store, nonfinite) as thread:
        thread.put(good)
        thread.drain()
        assert written == [(3, 1, {"row": [0], "value": [1.0]}, 1)]
        assert waited == ["waited"]
        thread.put(bad)
        if nonfinite == "error":
            with pytest.raises(NonFiniteError):
                thread.drain()
            with pytest.raises(NonFiniteError):
                thread.put(good)
        else:
            thread.drain()
            thread.put(good)
    assert len(written) == (1 if nonfinite == "error" else 3)


def test_rows_as_lines_of_json_have_the_shortest_numbers_of_their_dtype(tmp_path: Path) -> None:
    writer = JsonlWriter(JsonlWriterConfig())
    rows: dict[str, Sequence[object]] = {
        "row": [0, 1, np.int64(2)],
        "é": [1.5, math.nan, [1.0, {"a": math.inf}]],
        "x": [np.asarray([0.1, np.nan], np.float32), np.asarray([[1, 2]]), np.float32(0.1)],
    }
    writer.write(tmp_path / "a", rows)
    assert (tmp_path / "a").read_text("utf-8").splitlines() == [
        '{"row": 0, "é": 1.5, "x": [0.1, null]}',
        '{"row": 1, "é": null, "x": [[1, 2]]}',
        '{"row": 2, "é": [1.0, {"a": null}], "x": 0.1}',
    ]
    with pytest.raises(FileExistsError):
        writer.write(tmp_path / "a", rows)
    writer.join([tmp_path / "a", tmp_path / "a"], tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a").read_bytes() * 2
    with pytest.raises(FileExistsError):
        writer.join([tmp_path / "a"], tmp_path / "b")
    assert writer.suffix == ".jsonl"

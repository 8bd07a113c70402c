"""Parts of an inference run: state, refusals and output."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from d9d_core.errors import BuildError, CheckpointError, JobError, NonFiniteError
from d9d_core.inference import Columns
from d9d_inference.compose import weights_identity
from d9d_inference.config import JsonlWriterConfig, ParquetWriterConfig
from d9d_inference.part_store import PartStore, Standing
from d9d_inference.row_thread import KeptPack, RowThread, check_finite, joined_rows
from d9d_inference.writers.jsonl import JsonlWriter
from d9d_inference.writers.parquet import ParquetWriter
from d9d_testing.suites.inference.writer import WriterSuite

RECORD = {"job": {"task": {"name": "t"}}, "data": {"consumed": 0}}


class Doubles:
    """A task whose rows are the doubles of what was kept."""

    columns = {"row": "number", "value": "its double"}

    def rows(self, kept: Mapping[str, torch.Tensor]) -> Columns:
        return {"row": kept["rows"].tolist(), "value": (2 * kept["x"]).tolist()}

    def tally(self, rows: Columns) -> Mapping[str, float]:
        return {"total": float(sum(rows["value"]))}


@pytest.fixture
def store(tmp_path: Path) -> PartStore:
    made = PartStore(tmp_path / "run", JsonlWriter(JsonlWriterConfig()))
    made.directory.mkdir()
    return made


def rows_of(first: int, count: int) -> dict[str, Any]:
    return {"row": list(range(first, first + count)), "value": [0.5 * n for n in range(first, first + count)]}


def test_parts_that_any_rank_writes_in_any_order_are_joined_in_order(store: PartStore) -> None:
    assert store.begin(RECORD).samples == 0
    for first in (4, 0, 6, 2):
        store.write(first, 2, rows_of(first, 2), {"total": 1.0})
    store.advance(8, 8, {"consumed": 8})
    assert [first for first, _ in store.facts(8)] == [0, 2, 4, 6]
    store.finish(8, {"rows": 8})
    lines = [json.loads(line) for line in store.output.read_text().splitlines()]
    assert [line["row"] for line in lines] == list(range(8))
    assert not (store.directory / "parts").exists()
    assert store.begin(RECORD).finished


def test_a_killed_run_goes_on_behind_the_last_progress_and_forgets_what_came_after(store: PartStore) -> None:
    store.begin(RECORD)
    store.write(0, 4, rows_of(0, 4), {})
    store.advance(4, 8, {"consumed": 4})
    store.write(4, 2, rows_of(4, 2), {})  # of a pack whose other half was never written
    (store.directory / "parts" / ".000000000006-000000000002.jsonl.tmp").write_text("half a li")
    standing = store.begin(RECORD)
    assert (standing.samples, standing.stream, standing.finished) == (4, {"consumed": 4}, False)
    assert sorted(path.name for path in (store.directory / "parts").iterdir()) == [
        "000000000000-000000000004.json",
        "000000000000-000000000004.jsonl",
    ]
    assert not store.has(4, 2)


def test_a_run_that_was_killed_while_it_joined_joins_again(store: PartStore) -> None:
    store.begin(RECORD)
    store.write(0, 4, rows_of(0, 4), {})
    store.advance(4, 4, {"consumed": 4})
    (store.directory / ".output.jsonl.tmp").write_text("half")
    assert not store.begin(RECORD).finished
    store.finish(4, {"rows": 4})
    assert len(store.output.read_text().splitlines()) == 4


def test_a_run_that_was_killed_before_it_removed_its_parts_removes_them_at_the_next_start(store: PartStore) -> None:
    store.begin(RECORD)
    store.write(0, 4, rows_of(0, 4), {})
    store.advance(4, 4, {"consumed": 4})
    store.finish(4, {"rows": 4})
    (store.directory / "parts").mkdir()
    (store.directory / "parts" / "000000000000-000000000004.jsonl").write_text("{}\n")
    assert store.begin(RECORD).finished
    assert not (store.directory / "parts").exists()


def test_results_of_another_job_are_refused_with_the_fields_that_differ(store: PartStore) -> None:
    store.begin(RECORD)
    with pytest.raises(JobError, match=r"another job\.task\.name; choose another run\.name"):
        store.begin({**RECORD, "job": {"task": {"name": "other"}}})
    with pytest.raises(JobError, match=r"another job\.seed, job\.task; choose another run\.name"):
        store.begin({**RECORD, "job": {"task": None, "seed": 1}})


def test_at_most_five_fields_that_differ_are_named(store: PartStore) -> None:
    store.begin({"job": {}, "columns": {"row": "number"}})
    with pytest.raises(JobError, match=r"another job\.a, job\.b, job\.c, job\.d, job\.e; choose another run\.name"):
        store.begin({"job": dict.fromkeys("abcdef", 1), "columns": {"row": "number"}})
    assert store.begin({"job": {}, "columns": {"row": "another text"}}) == Standing(0, None, None)


def test_a_directory_is_owned_until_the_run_ends_also_if_it_is_made_for_it(tmp_path: Path) -> None:
    made, other = (PartStore(tmp_path / "a" / "b", JsonlWriter(JsonlWriterConfig())) for _ in range(2))
    for _ in range(2):
        made.own()
    with pytest.raises(CheckpointError, match=r"b belongs to a running process"):
        other.own()
    with made.opened():
        assert (tmp_path / "a" / "b" / "parts").is_dir()
    with other.opened():
        pass


def test_files_of_others_among_the_parts_are_removed(store: PartStore) -> None:
    store.begin(RECORD)
    store.write(0, 4, rows_of(0, 4), {})
    store.advance(4, 8, {"consumed": 4})
    for name in ("notes.json", "000000000000-000000000009.txt"):
        (store.directory / "parts" / name).write_text("{}")
    store.begin(RECORD)
    assert sorted(path.name for path in (store.directory / "parts").iterdir()) == [
        "000000000000-000000000004.json", "000000000000-000000000004.jsonl",
    ]  # fmt: skip


def test_an_output_is_joined_again_while_there_are_parts_and_kept_without_them(store: PartStore) -> None:
    store.begin(RECORD)
    store.write(0, 4, rows_of(0, 4), {})
    store.advance(4, 4, {"consumed": 4})
    store.output.write_text("half of an earlier join")
    store.finish(4, {"rows": 4})
    whole = store.output.read_text()
    assert len(whole.splitlines()) == 4
    # Killed before the summary was written.
    (store.directory / "summary.json").unlink()
    standing = store.begin(RECORD)
    assert (standing.samples, standing.finished) == (4, False)
    store.finish(4, {"rows": 5})
    assert (store.output.read_text(), store.begin(RECORD).summary) == (whole, {"rows": 5})
    store.output.unlink()
    assert not store.begin(RECORD).finished


def test_an_output_that_nobody_knows_is_refused(store: PartStore) -> None:
    store.output.write_text("precious")
    with pytest.raises(JobError, match="no inference run has written it"):
        store.begin(RECORD)
    assert store.output.read_text() == "precious"


def test_missing_parts_are_told_by_their_samples(store: PartStore) -> None:
    store.begin(RECORD)
    store.write(0, 2, rows_of(0, 2), {})
    store.write(4, 2, rows_of(4, 2), {})
    store.write(8, 2, rows_of(8, 2), {})
    store.advance(10, 10, {"consumed": 10})
    with pytest.raises(CheckpointError, match="samples 2 to 4 are missing"):
        store.finish(10, {})


def test_parts_of_a_rank_that_lived_on_with_another_share_do_no_harm(store: PartStore) -> None:
    store.begin(RECORD)
    for first, count in ((0, 2), (2, 2), (4, 2), (6, 2), (0, 3), (4, 3)):  # the rows of three go nowhere
        store.write(first, count, rows_of(first, count), {"total": float(count)})
    store.advance(8, 8, {"consumed": 8})
    assert sum(part.sums["total"] for _, part in store.facts(8)) == 8
    store.finish(8, {})
    assert [json.loads(line)["row"] for line in store.output.read_text().splitlines()] == list(range(8))


def test_a_damaged_progress_is_told(store: PartStore) -> None:
    store.begin(RECORD)
    (store.directory / "progress.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"progress\.json is damaged"):
        store.begin(RECORD)


def test_a_second_process_is_refused_while_a_run_goes_on(store: PartStore) -> None:
    other = PartStore(store.directory, JsonlWriter(JsonlWriterConfig()))
    with store.opened(), pytest.raises(CheckpointError, match="running process"), other.opened():
        pass


# --- rows


def kept(first: int, rows: list[int], values: list[float]) -> dict[str, torch.Tensor]:
    del first
    return {"rows": torch.tensor(rows), "x": torch.tensor(values)}


def test_rows_come_in_order_and_fillers_go() -> None:
    rows = joined_rows(Doubles(), [kept(0, [3, 1, -1], [3, 1, 9]), kept(0, [-1, -1], [9, 9]), kept(0, [0, 2], [0, 2])])  # type: ignore[arg-type]
    assert rows == {"row": [0, 1, 2, 3], "value": [0, 2, 4, 6]}


def test_rows_of_other_columns_than_declared_are_refused() -> None:
    class Wrong(Doubles):
        def rows(self, kept: Mapping[str, torch.Tensor]) -> Columns:
            return {"row": kept["rows"].tolist(), "value": [1.0]}

    with pytest.raises(BuildError, match=r"Wrong\.rows\(\) returned the columns"):
        joined_rows(Wrong(), [kept(0, [0, 1], [1, 2])])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), np.float32("nan"), np.array([1.0, np.nan]), [0.0, -np.inf]]
)
def test_a_row_with_nan_or_infinity_is_named(value: object) -> None:
    with pytest.raises(NonFiniteError, match="row 7: 'value' has NaN or infinity"):
        check_finite({"row": [6, 7], "value": [1.0, value]})
    check_finite({"row": [6], "value": [[1, 2]]})


def test_what_a_pack_meets_is_raised_where_the_next_is_handed_over(store: PartStore) -> None:
    store.begin(RECORD)
    with RowThread(Doubles(), store, "error") as rows:  # type: ignore[arg-type]
        rows.put(KeptPack(0, 1, [kept(0, [0], [float("nan")])], None))
        with pytest.raises(NonFiniteError):
            rows.drain()
        with pytest.raises(NonFiniteError):
            rows.put(KeptPack(1, 1, [kept(0, [1], [1.0])], None))
    assert not store.has(0, 1)


def test_a_writer_that_fails_leaves_no_part(store: PartStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, _rows: Columns) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    store.begin(RECORD)
    monkeypatch.setattr(store._writer, "write", fail)
    with RowThread(Doubles(), store, "error") as rows:  # type: ignore[arg-type]
        rows.put(KeptPack(0, 1, [kept(0, [0], [1.0])], None))
        with pytest.raises(OSError, match="No space"):
            rows.drain()
    assert not store.has(0, 1)
    store.begin(RECORD)
    assert not list((store.directory / "parts").iterdir())


# --- writers


def test_json_lines_have_the_shortest_numbers_that_read_back(tmp_path: Path) -> None:
    rows = {
        "row": [0, 1],
        "single": [np.float32(0.1), np.float32("nan")],
        "many": [np.array([0.1, 1e-7], dtype=np.float32), np.array([[1, 2], [3, 4]])],
        "text": ["ä\n", None],
        "plain": [float("inf"), {"a": [1.5, float("nan")]}],
    }
    JsonlWriter(JsonlWriterConfig()).write(tmp_path / "rows.jsonl", rows)
    first, second = (tmp_path / "rows.jsonl").read_text("utf-8").splitlines()
    assert first == '{"row": 0, "single": 0.1, "many": [0.1, 1e-07], "text": "ä\\n", "plain": null}'
    assert json.loads(second) == {
        "row": 1, "single": None, "many": [[1, 2], [3, 4]], "text": None, "plain": {"a": [1.5, None]},
    }  # fmt: skip


@pytest.mark.thorough
def test_parquet_has_the_same_bytes_however_it_was_cut_into_parts(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    writer = ParquetWriter(ParquetWriterConfig(row_group=4))
    values = {"row": list(range(11)), "vector": [np.arange(n % 3, dtype=np.float32) for n in range(11)]}
    whole = []
    for name, cuts in (("a", [0, 11]), ("b", [0, 1, 5, 6, 11])):
        parts = []
        for begin, end in pairwise(cuts):
            parts.append(tmp_path / f"{name}{begin}.parquet")
            writer.write(parts[-1], {column: every[begin:end] for column, every in values.items()})
        writer.join(parts, tmp_path / f"{name}.parquet")
        whole.append((tmp_path / f"{name}.parquet").read_bytes())
    assert whole[0] == whole[1]
    table = parquet.read_table(tmp_path / "a.parquet")
    assert table["row"].to_pylist() == values["row"]
    assert table["vector"].to_pylist() == [one.tolist() for one in values["vector"]]
    assert parquet.ParquetFile(tmp_path / "a.parquet").metadata.num_row_groups == 3


class TestJsonLines(WriterSuite):
    target = "jsonl"

    def read(self, path: Path) -> list[dict[str, Any]]:
        return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="pyarrow is an extra")
class TestParquet(WriterSuite):
    target = "parquet"
    config: ClassVar[Mapping[str, Any]] = {"row_group": 7}

    def read(self, path: Path) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pytest.importorskip("pyarrow.parquet").read_table(path).to_pylist()
        return rows


def test_weights_in_a_single_file_are_recognised_by_size_and_time(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"one")
    before = weights_identity(str(file))
    assert weights_identity(str(file)) == before
    file.write_bytes(b"others")
    assert weights_identity(str(file)) != before

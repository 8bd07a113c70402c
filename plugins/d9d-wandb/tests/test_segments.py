"""Files of wandb are read as they grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from d9d_wandb import segments
from d9d_wandb.segments import Segment
from wandb.proto.wandb_internal_pb2 import HistoryItem, HistoryRecord, Record

BLOCK = 1 << 15


def record(step: int, text: str = "") -> bytes:
    items = [HistoryItem(nested_key=[name], value_json=json.dumps(v)) for name, v in {"step": step, "t": text}.items()]
    return Record(history=HistoryRecord(item=items)).SerializeToString()


def written(records: list[bytes]) -> bytes:
    """A file with the records, in pieces where blocks end."""
    data = bytearray(7)
    for content in records:
        first, rest = True, content
        while first or rest:
            if (left := BLOCK - len(data) % BLOCK) < 7:
                data += bytes(left)
                left = BLOCK
            piece, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            data += bytes(4) + len(piece).to_bytes(2, "little") + bytes([kind]) + piece
            first = False
    return bytes(data)


def test_a_file_that_grows_is_read_from_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["x" * length for length in (10, 3 * BLOCK, 5, BLOCK // 2, BLOCK - 100, 1)]
    whole = written([record(step, text) for step, text in enumerate(texts)])
    segment = Segment(path := tmp_path / "run.wandb")
    read: list[int] = []
    real = segments._read_from

    def counted(path: Path, offset: int) -> bytes:
        read.append(len(data := real(path, offset)))
        return data

    monkeypatch.setattr(segments, "_read_from", counted)
    found = list(segment.rows())
    for end in (100, 20000, 3 * BLOCK, 4 * BLOCK, 5 * BLOCK - 3, len(whole), len(whole)):
        path.write_bytes(whole[:end])
        found += segment.rows()
    assert [(row["step"], row["t"]) for row in found] == list(enumerate(texts))
    assert read[-1] == 0


@pytest.mark.parametrize("left", range(1, 9))
def test_a_file_may_end_with_the_filled_end_of_a_block(tmp_path: Path, left: int) -> None:
    spare = BLOCK - left - len(written([record(0, "x" * 20_000)]))
    records = [record(0, "x" * (20_000 + spare)), record(1)]
    whole = written(records)
    assert len(written(records[:1])) == BLOCK - left
    segment = Segment(path := tmp_path / "run.wandb")
    for end, steps in ((BLOCK, [0]), (BLOCK + 6, []), (len(whole), [1])):  # six bytes of a piece's head are too few
        path.write_bytes(whole[:end])
        assert [row["step"] for row in segment.rows()] == steps


def test_rows_have_nested_and_plain_names_and_other_records_are_passed_over(tmp_path: Path) -> None:
    items = [
        HistoryItem(key="plain", value_json="1.5"),
        HistoryItem(nested_key=["h", "_type"], value_json='"histogram"'),
        HistoryItem(nested_key=["h", "bins", "0"], value_json="2"),
    ]
    other, row = Record(uuid="u"), Record(history=HistoryRecord(item=items))
    (path := tmp_path / "run.wandb").write_bytes(written([other.SerializeToString(), row.SerializeToString()]))
    assert list(Segment(path).rows()) == [{"plain": 1.5, "h": {"_type": "histogram", "bins/0": 2}}]
    assert list(Segment(tmp_path / "none.wandb").rows()) == []


def test_segments_of_a_run_are_found_in_the_order_of_their_starts(tmp_path: Path) -> None:
    names = [
        "offline-run-2026_2-abc",
        "offline-run-2026_1-abc",
        "run-2025_1-abc",
        "offline-run-2026_1-abcd",
        "other-abc",
    ]
    for name in names:
        (folder := tmp_path / "wandb" / name).mkdir(parents=True)
        (folder / "run-abc.wandb").write_bytes(b"")
    found = [path.parent.name for path in segments.find_segments(tmp_path, "abc")]
    assert found == [
        "offline-run-2026_1-abc", "offline-run-2026_1-abcd", "offline-run-2026_2-abc", "run-2025_1-abc",
    ]  # fmt: skip
    assert segments.find_segments(tmp_path, "ab") == []


def test_files_have_settled_when_their_sizes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "a").write_bytes(b"")
    slept: list[float] = []
    growths = 2

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) <= growths:
            path.write_bytes(bytes(len(slept)))

    monkeypatch.setattr(segments.time, "sleep", sleep)
    monkeypatch.setattr(segments.time, "monotonic", lambda: sum(slept))
    segments.wait_until_settled([path])
    assert slept == [1.1, 1.1, 1.1]  # it grew twice; the third wait shows that it settled
    slept.clear()
    growths = 1000
    segments.wait_until_settled([path], seconds=1.0, most=3.0)
    assert slept == [1.0, 1.0, 1.0]


def test_a_piece_that_does_not_fit_into_a_block_begins_in_the_next_one(tmp_path: Path) -> None:
    for left in (1, 6, 7):  # bytes that are left in the first block; a piece takes seven and its content
        room = BLOCK - left - 7 - 7
        first = next(made for size in range(room) if len(made := record(1, "x" * (room - size))) == room)
        (path := tmp_path / f"{left}.wandb").write_bytes(content := written([first, record(2, "y")]))
        assert content[BLOCK - left : BLOCK] == (bytes(left) if left < 7 else bytes(6) + b"\2")
        assert [row["step"] for row in Segment(path).rows()] == [1, 2]


def test_a_record_that_is_half_written_is_left_for_later(tmp_path: Path) -> None:
    ends, whole = [], bytearray()
    for count in (1, 2, 3):
        whole = bytearray(written([record(step, "text") for step in range(count)]))
        ends.append(len(whole))
    for cut in range(len(whole) + 1):
        (path := tmp_path / "run.wandb").write_bytes(whole[:cut])
        segment = Segment(path)
        first = [row["step"] for row in segment.rows()]
        assert first == [step for step, end in enumerate(ends) if end <= cut]
        path.write_bytes(whole)
        assert [*first, *(row["step"] for row in segment.rows())] == [0, 1, 2]

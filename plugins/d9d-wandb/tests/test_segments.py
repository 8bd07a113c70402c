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

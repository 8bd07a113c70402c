"""Files that wandb writes on this machine: one segment for each start or resume of a run.

A file begins with a header of seven bytes, followed by blocks of 32 KiB in LevelDB's log format (doc/log_format.md of
LevelDB): records are divided into pieces, each with a checksum, a length and a type. A record is a protocol buffer;
only history records are read here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

_HEADER, _BLOCK, _PIECE = 7, 1 << 15, 7
_WHOLE, _FIRST, _LAST = 1, 2, 4


class Segment:
    """Reader of one segment file of a W&B run, which may still grow.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = _HEADER

    def rows(self) -> Iterator[dict[str, Any]]:
        """Complete history rows that were written since the last call.

        Histograms, pictures and tables are mappings with a field ``_type``.
        """
        for content in self._records():
            record = Record()
            record.ParseFromString(content)
            if record.HasField("history"):
                row: dict[str, Any] = {}
                for item in record.history.item:
                    name, *fields = item.nested_key or [item.key]
                    if fields:
                        row.setdefault(name, {})["/".join(fields)] = json.loads(item.value_json)
                    else:
                        row[name] = json.loads(item.value_json)
                yield row

    def _records(self) -> Iterator[bytes]:
        base = position = self._offset
        data, pieces = memoryview(_read_from(self.path, base)), bytearray()
        end = base + len(data)
        while position + _PIECE <= end:
            if (left := _BLOCK - position % _BLOCK) < _PIECE:  # too little space for a piece; filled with zeros
                position += left
                continue
            head = data[position - base :][:_PIECE]
            length, kind = int.from_bytes(head[4:6], "little"), head[6]
            begin = position + _PIECE
            if kind == 0 or begin + length > end:
                return
            position = begin + length
            pieces = pieces if kind not in (_WHOLE, _FIRST) else bytearray()
            pieces += data[begin - base : position - base]
            if kind in (_WHOLE, _LAST):
                self._offset = position
                yield bytes(pieces)


def _read_from(path: Path, offset: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        file.seek(offset)
        return file.read()


def find_segments(directory: Path, run_id: str) -> list[Path]:
    """Find the files of a run below ``<directory>/wandb``, sorted by their start time.

    If the clock was set back, a directory name may be taken already; wandb then appends a number.
    """
    return sorted((directory / "wandb").glob(f"*run-*-{run_id}*/run-{run_id}.wandb"))


def wait_until_settled(paths: list[Path], seconds: float = 1.1, most: float = 10.0) -> None:
    """Wait until files stop growing: wandb writes them in a separate process, which outlives a killed training process.

    It waits more than a second, because the directory of the next file is named after the second in which it starts.
    """
    deadline = time.monotonic() + most
    sizes: Mapping[Path, int] | None = None
    while sizes != (now := {path: path.stat().st_size for path in paths}) and time.monotonic() < deadline:
        sizes = now
        time.sleep(seconds)

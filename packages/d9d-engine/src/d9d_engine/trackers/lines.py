"""Files of one JSON object per line and logged step."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from d9d_core.untrusted import open_regular, parse_json, visible
from d9d_weights.files.atomic import replacing

#: Bytes that may wait for a disk that is full; more of them are an error.
ROOM = 16 * 2**20
#: Bytes of the longest line that is read in one piece; parts of a longer one are no JSON.
_LONGEST = 1 << 26


class LineFile:
    """File of lines of logged steps, which is cut back to the resumed step.

    What cannot be written, because the disk is full or fails for a while, waits in memory for the next call.

    Args:
        path: where.
        resumed_step: lines of later steps, and a line torn by a crash, are cut off.
        length: bytes that the file had at the checkpoint; lines of ``resumed_step`` itself that came later are cut off
            too. ``None`` if that is not known.
        lazy: make a new file with its first line only.
    """

    def __init__(self, path: Path, resumed_step: int, lazy: bool = False, length: int | None = None) -> None:
        self.path = path
        self._waiting = bytearray()
        self._said = False
        path.parent.mkdir(parents=True, exist_ok=True)
        if resumed_step and path.exists():
            _cut(path, resumed_step, length)
        else:
            path.unlink(missing_ok=True)
        self._written = path.stat().st_size if path.exists() else 0
        # Without a buffer, so that it is known what has been written.
        self._file = path.open("ab", buffering=0) if path.exists() or not lazy else None

    @property
    def length(self) -> int:
        """Bytes of the file, with those that wait."""
        return self._written + len(self._waiting)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line; other processes see it at once.

        Raises:
            OSError: too much waits for the disk.
        """
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        if (error := self._write()) is None:
            return
        if len(self._waiting) > ROOM:
            raise error
        if not self._said:
            self._said = True
            text = f"warning: {self.path}: {error.strerror}; lines wait in memory until they can be written"
            with suppress(OSError):  # it may be the same disk
                print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - a tracker's only way to say something

    def sync(self) -> None:
        """Sync all lines to the disk, if it takes them."""
        if self._write() is None and self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: lines that waited cannot be written still.
        """
        error = self._write()
        if self._file is not None:
            self._file.close()
        if error is not None:
            raise error

    def _write(self) -> OSError | None:
        """Write what waits; returns why that is not possible now."""
        try:
            while self._waiting:
                if self._file is None:
                    self._file = self.path.open("ab", buffering=0)
                done = self._file.write(self._waiting)
                self._written += done
                del self._waiting[:done]
        except OSError as error:
            return error
        return None


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Read the complete lines of a file, one by one; lines torn by a crash are left out."""
    for _, line in _read(path):
        yield line


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Read complete lines with the bytes before each."""
    try:
        file = os.fdopen(open_regular(path, "near"), "rb")
    except OSError:  # absent, or a pipe or a device, which would never end
        return
    position = 0
    with file:
        while text := file.readline(_LONGEST):
            begin, position = position, position + len(text)
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict) and isinstance(line.get("step"), int):
                yield begin, line


def _cut(path: Path, step: int, length: int | None) -> None:
    # Line by line and not as a whole: tables of a long run are large.
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        for begin, line in _read(path):
            if line["step"] < step or (line["step"] == step and (length is None or begin < length)):
                file.write(json.dumps(line) + "\n")

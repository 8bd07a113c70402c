"""Files with one JSON object per line."""

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

#: Largest number of bytes kept in memory while a disk is full.
ROOM = 16 * 2**20
#: Longest line in bytes that is read; a longer line is read in parts, which are invalid JSON and are skipped.
_LONGEST = 1 << 26


class LineFile:
    """File with one line per entry of a step, cut back to the resumed step when opened.

    Lines that cannot be written, because the disk is full or fails temporarily, are kept in memory until the next call.

    Args:
        path: path of the file.
        resumed_step: lines of later steps, and a line torn by a crash, are cut off.
        length: size of the file in bytes at the checkpoint; later lines of ``resumed_step`` itself are cut off, too.
            ``None`` if unknown.
        lazy: create a new file at the first line only.
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
        # Write without a buffer, so that the number of written bytes is known.
        self._file = path.open("ab", buffering=0) if path.exists() or not lazy else None

    @property
    def length(self) -> int:
        """Size of the file in bytes, including lines in memory."""
        return self._written + len(self._waiting)

    def append(self, line: Mapping[str, Any]) -> None:
        """Write one line, at once visible to other processes.

        Raises:
            OSError: the disk takes no data, and too many lines are in memory.
        """
        self._waiting += json.dumps(line, allow_nan=False).encode() + b"\n"
        if (error := self._write()) is None:
            return
        if len(self._waiting) > ROOM:
            raise error
        if not self._said:
            self._said = True
            text = f"warning: {self.path}: {error.strerror}; lines wait in memory until they can be written"
            with suppress(OSError):  # standard error may be on the same disk
                print(visible(text), file=sys.stderr, flush=True)  # noqa: T201 - a tracker has no other way to report

    def sync(self) -> None:
        """Sync all lines to the disk, if possible."""
        if self._write() is None and self._file is not None:
            with suppress(OSError):
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: lines in memory still cannot be written.
        """
        error = self._write()
        if self._file is not None:
            self._file.close()
        if error is not None:
            raise error

    def _write(self) -> OSError | None:
        """Write pending lines; return the error if the disk takes no data."""
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
    """Read the complete lines of a file one by one; lines torn by a crash are skipped."""
    for _, line in _read(path):
        yield line


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield complete lines, each with its byte offset."""
    try:
        file = os.fdopen(open_regular(path, "near"), "rb")
    except OSError:  # missing, or a pipe or device, whose content may never end
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
    # Copy line by line, because tables of a long run are large.
    with replacing(path) as temporary, temporary.open("x", encoding="utf-8") as file:
        for begin, line in _read(path):
            if line["step"] < step or (line["step"] == step and (length is None or begin < length)):
                file.write(json.dumps(line) + "\n")

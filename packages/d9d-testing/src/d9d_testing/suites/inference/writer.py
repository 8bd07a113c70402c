"""Conformance suite of writers: parts are joined in order, and the output does not depend on their sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from d9d_testing.suites.support.component import ComponentSuite

#: Rows of several types, as returned by inference tasks.
_ROWS: Mapping[str, Sequence[Any]] = {
    "row": list(range(23)),
    "text": [f'row {number}: ä\n"{number}"' for number in range(23)],
    "score": [number / 7 for number in range(23)],
    "vector": [np.linspace(0, number, num=1 + number % 4, dtype=np.float32) for number in range(23)],
    "tokens": [np.arange(number % 5) for number in range(23)],
}


class WriterSuite(ComponentSuite):
    """Conformance suite of writers (:class:`d9d_core.inference.Writer`).

    Subclass it, name the writer, and implement reading a file back::

        class TestMyWriter(WriterSuite):
            target = "my_writer"

            def read(self, path):
                return [json.loads(line) for line in path.read_text().splitlines()]

    Attributes:
        cuts: ways to split the 23 rows into parts, each a list of boundaries from 0 to 23.
    """

    kind = "writer"

    cuts: ClassVar[Sequence[Sequence[int]]] = ((0, 23), (0, 1, 23), (0, 5, 6, 20, 23))

    def read(self, path: Path) -> list[dict[str, Any]]:
        """Rows of a file, in order."""
        raise AssertionError(f"{type(self).__name__} must override read(); return the rows of {path}")

    def test_the_suffix_begins_with_a_dot(self) -> None:
        """The suffix begins with a dot, because it is appended to the name of the output."""
        suffix = self.build().suffix
        assert suffix.startswith("."), f"suffix is {suffix!r}; begin it with a dot"
        assert os.sep not in suffix

    def test_parts_are_joined_in_order_and_read_back(self, tmp_path: Path) -> None:
        """Parts that are written in any order are joined in the order of their rows, and read back equal."""
        writer = self.build()
        for number, cuts in enumerate(self.cuts):
            rows = self.read(self.joined(writer, tmp_path / str(number), cuts))
            assert [row["row"] for row in rows] == _ROWS["row"], f"cut at {cuts}: rows are missing, doubled or moved"
            for row, place in zip(rows, range(23), strict=True):
                for name in ("text", "score"):
                    assert row[name] == _ROWS[name][place], f"cut at {cuts}, row {place}: {name} is {row[name]!r}"
                for name in ("vector", "tokens"):
                    read, given = np.asarray(row[name]), _ROWS[name][place]
                    same = np.array_equal(read.astype(given.dtype), given)
                    assert same, f"cut at {cuts}, row {place}: {name} is {row[name]!r}, not {given.tolist()}"

    def test_the_output_does_not_show_how_it_was_cut(self, tmp_path: Path) -> None:
        """A run continued on other ranks writes other parts, but the joined output is identical to the last byte."""
        writer = self.build()
        outputs = {
            tuple(cuts): self.joined(writer, tmp_path / str(number), cuts).read_bytes()
            for number, cuts in enumerate(self.cuts)
        }
        first, *others = outputs.items()
        for cuts, content in others:
            assert content == first[1], f"parts cut at {cuts} give other bytes than those cut at {first[0]}"

    def test_a_part_is_written_again_with_the_same_bytes(self, tmp_path: Path) -> None:
        """Equal rows give byte-identical files, so files contain no times or random numbers."""
        writer = self.build()
        contents = []
        for name in ("first", "second"):
            path = tmp_path / f"{name}{writer.suffix}"
            writer.write(path, _ROWS)
            contents.append(path.read_bytes())
        assert contents[0] == contents[1], "write() gives different bytes for equal rows"

    def test_a_failing_disk_is_told(self, tmp_path: Path) -> None:
        """``write`` raises ``OSError`` if a part cannot be written; otherwise the loss would go unnoticed."""
        writer = self.build()
        try:
            writer.write(tmp_path / "absent" / f"part{writer.suffix}", _ROWS)
        except OSError:
            return
        raise AssertionError("write() into a directory that does not exist raised no OSError; let it through")

    def joined(self, writer: Any, directory: Path, cuts: Sequence[int]) -> Path:
        """Joined output of all rows, from parts with the given boundaries, written in reverse order."""
        directory.mkdir()
        parts: list[Path] = []
        for begin, end in reversed(list(pairwise(cuts))):
            path = directory / f"{begin}{writer.suffix}"
            writer.write(path, {name: values[begin:end] for name, values in _ROWS.items()})
            parts.insert(0, path)
        output: Path = directory / f"output{writer.suffix}"
        written = sorted(path.name for path in directory.iterdir())
        expected = sorted(path.name for path in parts)
        assert written == expected, (
            f"write() leaves the files {written}, expected {expected}; rename or remove temporary files, because "
            "the engine takes all files in the directory of the parts for parts"
        )
        writer.join(parts, output)
        return output

"""Damage to files: what it changes, and what it leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.hostile.files import damage, edit_header
from hypothesis import find, settings
from hypothesis import strategies as st

CONTENT = b"0123456789"
QUICK = settings(max_examples=2000, database=None, derandomize=True)


def damaged(directory: Path, content: bytes) -> st.SearchStrategy[tuple[str, bytes | None]]:
    """Descriptions of damage to one file, and the file's bytes; ``None`` if it is no regular file any more."""
    outside = directory.parent / "outside"
    outside.write_bytes(b"outside")

    @st.composite
    def one(draw: Any) -> tuple[str, bytes | None]:
        path = directory / "file.bin"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink(missing_ok=True)
        path.write_bytes(content)
        said = damage(draw, directory, outside)
        return said, path.read_bytes() if path.is_file() and not path.is_symlink() else None

    return one()


@pytest.mark.parametrize("place", [0, 4, len(CONTENT) - 1])
def test_any_byte_of_a_file_may_change_alone(tmp_path: Path, place: int) -> None:
    directory = tmp_path / "files"
    directory.mkdir()

    def only_there(found: tuple[str, bytes | None]) -> bool:
        content = found[1]
        return (
            content is not None
            and len(content) == len(CONTENT)
            and [at for at in range(len(CONTENT)) if content[at] != CONTENT[at]] == [place]
        )

    find(damaged(directory, CONTENT), only_there, settings=QUICK)


@pytest.mark.parametrize("left", [0, 5, len(CONTENT) - 1])
def test_a_file_may_be_cut_anywhere(tmp_path: Path, left: int) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    find(damaged(directory, CONTENT), lambda found: found[1] == CONTENT[:left], settings=QUICK)


def test_an_empty_file_may_be_damaged(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    find(damaged(directory, b""), lambda found: found[1] is not None and len(found[1]) == 1, settings=QUICK)
    find(damaged(directory, b""), lambda found: found[1] is None, settings=QUICK)


def test_the_header_of_safetensors_keeps_what_follows_it(tmp_path: Path) -> None:
    header = json.dumps({"a": {"shape": [1]}}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    answers = iter([{"b": 1}, 3])
    edit_header(lambda _strategy: next(answers), path)
    assert path.read_bytes() == (3).to_bytes(8, "little") + b'{"b": 1}' + b"data"

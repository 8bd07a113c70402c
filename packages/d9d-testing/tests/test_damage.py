"""Damage to files: changed bytes, and bytes that stay."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from d9d_testing.hostile.files import damage, damage_checkpoint, edit_header
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


def scripted(*answers: Any) -> Any:
    """Function that draws the given answers in turn."""
    left = iter(answers)
    return lambda _strategy: next(left)


def checkpoints(directory: Path) -> Path:
    for step in (1, 2):
        folder = directory / f"step-{step}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text('{"a": 1}')
        (folder / "manifest.json").write_text(json.dumps({"files": {"run.json": {}}, "sha256": "old"}))
    return directory


def sealed(folder: Path) -> bool:
    manifest = json.loads((folder / "manifest.json").read_text())
    own = manifest.pop("sha256")
    return bool(own == hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest())


def test_a_damaged_manifest_has_a_valid_checksum_of_its_own(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "checkpoints")
    said = damage_checkpoint(scripted(root / "step-2", "manifest", {"files": {}, "sha256": "x"}), root, tmp_path)
    assert said == "manifest of step-2"
    assert json.loads((root / "step-2" / "manifest.json").read_text())["files"] == {}
    assert sealed(root / "step-2")
    assert not sealed(root / "step-1")
    damage_checkpoint(scripted(root / "step-1", "manifest", ["no mapping"]), root, tmp_path)
    assert json.loads((root / "step-1" / "manifest.json").read_text()) == ["no mapping"]


def test_consistent_damage_has_valid_checksums_everywhere(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "checkpoints")
    file = root / "step-1" / "run.json"
    said = damage_checkpoint(scripted(root / "step-1", "consistent", file, {"a": 12}), root, tmp_path)
    assert said == "consistent of step-1"
    assert file.read_text() == '{"a": 12}'
    facts = {"bytes": 9, "sha256": hashlib.sha256(b'{"a": 12}').hexdigest()}
    assert json.loads((root / "step-1" / "manifest.json").read_text())["files"] == {"run.json": facts}
    assert sealed(root / "step-1")


@pytest.mark.parametrize("way", ["copy", "move", "file", "link", "folder"])
def test_names_of_checkpoints_may_change(tmp_path: Path, way: str) -> None:
    root = checkpoints(tmp_path / "checkpoints")
    said = damage_checkpoint(scripted(root / "step-1", "names", way, "step-99"), root, tmp_path)
    assert said == f"{way} of step-1 as step-99"
    made = root / "step-99"
    assert (root / "step-1").exists() == (way != "move")
    assert made.is_symlink() == (way == "link")
    assert made.is_file() == (way == "file")
    found = sorted(path.name for path in made.iterdir()) if made.is_dir() else None
    assert found == {"copy": ["manifest.json", "run.json"], "move": ["manifest.json", "run.json"],
                     "link": ["manifest.json", "run.json"], "file": None, "folder": []}[way]  # fmt: skip


@pytest.mark.parametrize("way", ["bytes", "cut", "link", "device", "pipe", "gone", "empty", "folder"])
def test_each_way_damages_the_file_alone(tmp_path: Path, way: str) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    (file := directory / "a.bin").write_bytes(CONTENT)
    (directory / "b.bin").write_bytes(CONTENT)
    (tmp_path / "outside").write_bytes(b"outside")
    answers = (3, 255) if way == "bytes" else (3,)
    assert damage(scripted(file, way, *answers), directory, tmp_path / "outside") == f"{way} of a.bin"
    assert (directory / "b.bin").read_bytes() == CONTENT
    assert file.is_fifo() == (way == "pipe")
    assert file.is_dir() == (way == "folder")
    assert file.exists() == (way != "gone")
    targets = {"link": tmp_path / "outside", "device": Path("/dev/zero")}
    assert (file.readlink() if file.is_symlink() else None) == targets.get(way)
    contents = {"bytes": b"012\xff456789", "cut": b"012", "empty": b""}
    if way in contents:
        assert file.read_bytes() == contents[way]


class Drawer:
    """Function that draws the given answers in turn, and keeps the possible ones."""

    def __init__(self, *answers: Any) -> None:
        self._answers = iter(answers)
        self.choices: list[Any] = []

    def __call__(self, strategy: Any) -> Any:
        found = getattr(strategy, "elements", None)
        self.choices.append(repr(strategy) if found is None else list(found))
        return next(self._answers)


def test_regular_files_alone_are_damaged_and_files_of_values_mostly_by_values(tmp_path: Path) -> None:
    directory, outside = tmp_path / "files", tmp_path / "outside"
    (directory / "inner").mkdir(parents=True)
    outside.write_bytes(b"")
    files = [directory / name for name in ("a.bin", "inner/b.json", "inner/c.safetensors")]
    for file in files:
        file.write_bytes(b'{"a": 1}' if file.suffix == ".json" else CONTENT)
    (directory / "link").symlink_to(files[0])
    others = ["bytes", "cut", "link", "device", "pipe", "gone", "empty", "folder"]
    draw = Drawer(files[0], "bytes", 9, 255)
    assert damage(draw, directory, outside) == "bytes of a.bin"
    assert draw.choices == [files, others, "integers(min_value=0, max_value=9)", "integers(min_value=0, max_value=255)"]
    assert files[0].read_bytes() == CONTENT[:9] + b"\xff"
    draw = Drawer(files[1], "json")
    with pytest.raises(StopIteration):  # the edits themselves are tested elsewhere
        damage(draw, directory, outside)
    assert draw.choices[1] == others + ["json"] * 12
    draw = Drawer(files[2], "cut", 0)
    damage(draw, directory, outside)
    assert draw.choices[2] == "integers(min_value=0, max_value=9)"
    assert draw.choices[1] == others + ["header"] * 12
    assert files[2].read_bytes() == b""
    draw = Drawer(files[2], "cut", 0)
    damage(draw, directory, outside)
    assert draw.choices[2] == "integers(min_value=0, max_value=0)"


def test_files_of_values_are_edited_in_their_own_ways(tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    (text := directory / "a.json").write_text('{"a": 1}')
    header = b'{"a": 1}'
    (tensors := directory / "b.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"data")
    assert damage(scripted(text, "json", {"a": 2}), directory, tmp_path) == "json of a.json"
    assert text.read_text() == '{"a": 2}'
    assert damage(scripted(tensors, "header", {"b": 3}, 9), directory, tmp_path) == "header of b.safetensors"
    assert tensors.read_bytes() == (9).to_bytes(8, "little") + b'{"b": 3}data'


def test_checkpoints_are_folders_and_consistent_damage_is_in_their_other_files(tmp_path: Path) -> None:
    root = checkpoints(tmp_path / "checkpoints")
    (root / "stray").write_text("")
    draw = Drawer(root / "step-1", "file", root / "step-1" / "run.json", "gone")
    assert damage_checkpoint(draw, root, tmp_path) == "gone of run.json"
    assert draw.choices[0] == [root / "step-1", root / "step-2"]
    assert draw.choices[1] == ["file", "manifest", "manifest", "manifest", "consistent", "names"]
    draw = Drawer(root / "step-2", "consistent")
    with pytest.raises(StopIteration):
        damage_checkpoint(draw, root, tmp_path)
    assert draw.choices[2] == [root / "step-2" / "run.json"]


def test_a_header_may_claim_another_length(tmp_path: Path) -> None:
    header = b'{"a": 1}'
    (path := tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    claims: list[list[int]] = []

    def draw(strategy: Any) -> Any:
        if hasattr(strategy, "elements"):
            claims.append(list(strategy.elements))
            return 8
        return {"a": 1}

    edit_header(draw, path)
    assert claims == [[8] * 9 + [0, 1, 7, 9, 10**8, 2**62]]

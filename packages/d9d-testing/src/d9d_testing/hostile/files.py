"""Damage to directories of files: JSON files, safetensors headers, bytes, links. Needs hypothesis."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from d9d_testing.hostile.values import edited

#: Function that draws an example of a strategy.
Draw = Callable[[st.SearchStrategy[Any]], Any]
LENGTH_BYTES = 8


def damage(draw: Draw, directory: Path, outside: Path) -> str:
    """Damage one file of a directory, and return a description of the damage.

    Args:
        draw: function that draws an example of a strategy.
        directory: directory with JSON, safetensors and other files.
        outside: forbidden file, a possible target of links.
    """
    files = sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    file = draw(st.sampled_from(files))
    ways = ["bytes", "cut", "link", "device", "pipe", "gone", "empty", "folder"]
    ways += ["json"] * 12 if file.suffix == ".json" else ["header"] * 12 if file.suffix == ".safetensors" else []
    way = draw(st.sampled_from(ways))
    if way == "json":
        edit_json(draw, file)
    elif way == "header":
        edit_header(draw, file)
    elif way in ("bytes", "cut"):
        content = bytearray(file.read_bytes())
        position = draw(st.integers(0, max(0, len(content) - 1)))
        content[position:] = b"" if way == "cut" else bytes([draw(st.integers(0, 255))]) + content[position + 1 :]
        file.write_bytes(content)
    elif way == "empty":
        file.write_bytes(b"")
    else:
        file.unlink()
        if way == "pipe":
            os.mkfifo(file)
        elif way == "folder":
            file.mkdir()
        elif way != "gone":
            file.symlink_to("/dev/zero" if way == "device" else outside)
    return f"{way} of {file.relative_to(directory)}"


def edit_json(draw: Draw, file: Path) -> None:
    """Replace the value in a JSON file by an edited copy."""
    file.write_text(json.dumps(draw(edited(json.loads(file.read_text("utf-8"))))), "utf-8")


def edit_header(draw: Draw, file: Path) -> None:
    """Edit the header of a safetensors file, and sometimes the stated length of the header."""
    content = file.read_bytes()
    length = int.from_bytes(content[:LENGTH_BYTES], "little")
    header, rest = json.loads(content[LENGTH_BYTES : LENGTH_BYTES + length]), content[LENGTH_BYTES + length :]
    text = json.dumps(draw(edited(header))).encode()
    claimed = draw(st.sampled_from([len(text)] * 9 + [0, 1, len(text) - 1, len(text) + 1, 10**8, 2**62]))
    file.write_bytes(claimed.to_bytes(LENGTH_BYTES, "little") + text + rest)


def damage_checkpoint(draw: Draw, checkpoints: Path, outside: Path) -> str:
    """Damage a file, a manifest (with a valid checksum) or names of checkpoints, and return a description.

    After ``"consistent"`` damage, all checksums are valid, so a load of other values is not an error.
    """
    folders = sorted(path for path in checkpoints.iterdir() if path.is_dir())
    folder = draw(st.sampled_from(folders))
    way = draw(st.sampled_from(["file", "manifest", "manifest", "manifest", "consistent", "names"]))
    if way == "file":
        return damage(draw, folder, outside)
    if way == "names":
        return _rename(draw, checkpoints, folder)
    if way == "manifest":
        edit_json(draw, folder / "manifest.json")
    else:
        files = [path for path in sorted(folder.iterdir()) if path.name != "manifest.json"]
        file = draw(st.sampled_from(files))
        (edit_json if file.suffix == ".json" else edit_header)(draw, file)
        manifest = json.loads((folder / "manifest.json").read_text())
        facts = {"bytes": file.stat().st_size, "sha256": hashlib.sha256(file.read_bytes()).hexdigest()}
        manifest["files"][file.name] = facts
        (folder / "manifest.json").write_text(json.dumps(manifest))
    sign(folder)
    return f"{way} of {folder.name}"


def sign(folder: Path) -> None:
    """Write the valid checksum into a checkpoint's manifest, so that the checksum does not reveal earlier damage."""
    manifest = json.loads((folder / "manifest.json").read_text())
    if isinstance(manifest, dict):
        manifest.pop("sha256", None)
        manifest["sha256"] = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()
        (folder / "manifest.json").write_text(json.dumps(manifest))


#: Further names that may appear in a directory of checkpoints.
STRAYS: Sequence[str] = (
    *("step-99", "step-7", "step-²", "step-00000006.damaged", "step-00000099", "step-00000002", "step-", "step-x"),
    *("step-99999999999999999999", "step--0000001", ".step-00000008.tmp", ".step-00000004.old.tmp", ".lock", "x"),
)


def _rename(draw: Draw, checkpoints: Path, folder: Path) -> str:
    way = draw(st.sampled_from(["copy", "move", "file", "link", "folder"]))
    name = draw(st.sampled_from(STRAYS))
    target = checkpoints / name
    if way == "copy":
        shutil.copytree(folder, target)
    elif way == "move":
        folder.rename(target)
    elif way == "file":
        target.write_text("x")
    elif way == "link":
        target.symlink_to(folder)
    else:
        target.mkdir()
    return f"{way} of {folder.name} as {name}"

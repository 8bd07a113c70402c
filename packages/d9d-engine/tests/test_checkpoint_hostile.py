"""Checkpoints damaged on purpose, with valid checksums: errors of ours, and nothing else is read."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_testing.hostile.files import sign
from d9d_weights.checkpoint.tensors import CheckpointTensors, is_checkpoint

Manifest = dict[str, Any]
FOLDER = "step-00000005"
TENSORS = "tensors-00000.safetensors"


def tensors() -> dict[str, torch.Tensor]:
    return {"model/a": torch.arange(6.0).view(2, 3), "model/b": torch.tensor([1.0, 2.0])}


def saved(directory: Path, *steps: int) -> CheckpointStore:
    store = CheckpointStore(directory)
    store.prepare()
    for step in steps or (5,):
        store.save(step, tensors(), {"data": {}}, {"job": {"model": {}}, "plugins": {}, "left_out": []})
    return store


def edit(folder: Path, change: Callable[[Manifest], None]) -> None:
    """Change a manifest, and its checksum with it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_bytes(json.dumps(manifest).encode())
    sign(folder)


def put(*path: Any) -> Callable[[Manifest], None]:
    """Change of the value at a path: its last word."""
    *path_to, key, value = path

    def change(manifest: Manifest) -> None:
        target: Any = manifest
        for part in path_to:
            target = target[part]
        target[key] = value

    return change


def moved(file: str) -> Callable[[Manifest], None]:
    """Change of the file that all pieces are in."""

    def change(manifest: Manifest) -> None:
        manifest["files"][file] = manifest["files"].pop(TENSORS)
        for entry in manifest["tensors"].values():
            entry["pieces"][0]["file"] = file

    return change


A = ("tensors", "model/a")
PIECE = (*A, "pieces", 0)
EDITS: dict[str, Callable[[Manifest], None]] = {
    "a file above": moved("../elsewhere.safetensors"),
    "an absolute file": moved("/etc/passwd"),
    "a file in a folder": moved(f"x/{TENSORS}"),
    "no file": moved(""),
    "a name with a zero byte": moved("tensors-00000\0.safetensors"),
    "a piece in an unlisted file": put(*PIECE, "file", "tensors-00001.safetensors"),
    "no values": lambda m: m["files"].pop("state.json"),
    "a negative size of a file": put("files", TENSORS, "bytes", -1),
    "a size that is no number": put("files", TENSORS, "bytes", "many"),
    "a checksum that is none": put("files", TENSORS, "sha256", None),
    "no checksum": lambda m: m["files"][TENSORS].pop("sha256"),
    "files are a list": put("files", []),
    "facts are a word": put("files", TENSORS, "x"),
    "a negative step": put("step", -1),
    "a step of a fraction": put("step", 5.5),
    "a step that is true": put("step", True),
    "a step as text": put("step", "5"),
    "a huge step": put("step", 10**30),
    "no step": lambda m: m.pop("step"),
    "no tensors": lambda m: m.pop("tensors"),
    "tensors are a list": put("tensors", [1]),
    "an unknown dtype": put(*A, "dtype", "float33"),
    "a dtype that is a function": put(*A, "dtype", "load"),
    "a dtype of no file": put(*A, "dtype", "complex64"),
    "a negative size": put(*A, "shape", [-2, -3]),
    "a size beyond all memory": put(*A, "shape", [2**62, 2**62]),
    "a million dimensions": put(*A, "shape", [1] * 10**6),
    "sizes are no numbers": put(*A, "shape", ["2", None]),
    "no pieces": put(*A, "pieces", []),
    "pieces are null": put(*A, "pieces", None),
    "a piece is a number": put(*A, "pieces", [3]),
    "a piece outside": put(*PIECE, "offset", [1, 0]),
    "a piece of fewer dimensions": put(*PIECE, "offset", [0]),
    "a negative offset": put(*PIECE, "offset", [-1, 0]),
    "another key": put(*PIECE, "key", "model/b"),
    "a key that is a list": put(*PIECE, "key", ["model/a"]),
    "an unknown field": put("surprise", 1),
    "plugins are a list": put("plugins", [1]),
    "a plugin is a number": put("plugins", {"x": 1}),
    "a job is a word": put("job", "job"),
    "what was left out is a number": put("left_out", 3),
    "a score of no number": put("score", {"series": "loss", "value": "low"}),
    "a score is a list": put("score", [1]),
}


@pytest.mark.thorough
@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS.keys())
def test_an_edited_manifest_is_an_error_before_anything_is_loaded(
    tmp_path: Path, change: Callable[[Manifest], None]
) -> None:
    store = saved(tmp_path)
    shutil.copy(tmp_path / FOLDER / TENSORS, tmp_path / "elsewhere.safetensors")
    (tmp_path / FOLDER / "x").mkdir()
    shutil.copy(tmp_path / FOLDER / TENSORS, tmp_path / FOLDER / "x")
    edit(tmp_path / FOLDER, change)
    with pytest.raises(CheckpointError, match=rf"no usable checkpoint: checkpoint {tmp_path}/{FOLDER}: manifest.json "):
        store.newest(lambda _: None)
    with pytest.raises(CheckpointError, match=FOLDER):
        CheckpointTensors(tmp_path / FOLDER)


@pytest.mark.parametrize(
    "content",
    [b"[" * 10**5, b'{"a": NaN}', b'{"a": "\\ud800"}', b'{"a": 1' + b"0" * 5000 + b"}", b"\xff", b"", b"3"],
    ids=["deep", "nan", "surrogate", "huge", "bytes", "empty", "number"],
)
def test_a_manifest_that_is_no_object_of_json_is_an_error(tmp_path: Path, content: bytes) -> None:
    store = saved(tmp_path)
    (tmp_path / FOLDER / "manifest.json").write_bytes(content)
    with pytest.raises(CheckpointError, match="manifest.json"):
        store.newest(lambda _: None)


def test_pieces_that_overlap_and_leave_a_gap_are_an_error(tmp_path: Path) -> None:
    def twice(manifest: Manifest) -> None:
        piece = manifest["tensors"]["model/a"]["pieces"][0]
        half = {**piece, "key": "model/a@0,0", "offset": [0, 0], "shape": [1, 3]}
        manifest["tensors"]["model/a"]["pieces"] = [half, half]

    store = saved(tmp_path)
    edit(tmp_path / FOLDER, twice)
    with pytest.raises(CheckpointError, match="pieces of the tensor overlap"):
        store.newest(lambda _: None)


@pytest.mark.parametrize("file", ["manifest.json", "state.json", TENSORS])
@pytest.mark.parametrize("target", ["/dev/zero", "outside", "pipe"])
def test_a_file_that_is_a_link_or_a_device_is_not_read(tmp_path: Path, file: str, target: str) -> None:
    store = saved(tmp_path / "run")
    inside = tmp_path / "run" / FOLDER / file
    inside.rename(tmp_path / "outside")
    if target == "pipe":
        os.mkfifo(inside)
    else:
        inside.symlink_to(tmp_path / target)
    with pytest.raises(CheckpointError, match=f"{file}.*(the file is a symbolic link|the path leads to a named pipe)"):
        store.newest(lambda _: None)


@pytest.mark.parametrize("stray", ["step-99", "step-7", "step-²", "step-000000009", "step-٠٠٠٠٠٠٠٩"])
def test_folders_that_no_save_made_are_ignored_with_one_warning(tmp_path: Path, stray: str) -> None:
    store = saved(tmp_path, 5)
    for name in (stray, "step-new", "step-newer", "step-newest"):
        shutil.copytree(tmp_path / FOLDER, tmp_path / name)
    notes: list[str] = []
    found = store.newest(notes.append)
    assert found is not None
    assert (found.step, store.set_aside(newer_than=5), store.steps()) == (5, [], [5])
    assert len(notes) == 1
    assert "and 1 more: checkpoints are called step-00000007 after their own step" in notes[0]
    assert (tmp_path / stray).is_dir()
    assert CheckpointTensors(tmp_path).location.endswith(FOLDER)


def test_a_copy_under_another_name_is_neither_used_nor_damaged_nor_removed(tmp_path: Path) -> None:
    store = saved(tmp_path, 5)
    shutil.copytree(tmp_path / FOLDER, tmp_path / "step-00000099")
    notes: list[str] = []
    found = store.newest(notes.append)
    assert found is not None
    assert (found.step, store.set_aside(newer_than=5)) == (5, [])
    assert len(notes) == 1
    assert "ignored step-00000099 (a copy of step 5)" in notes[0]
    assert CheckpointTensors(tmp_path).location.endswith(FOLDER)


def test_a_copy_under_another_name_takes_no_place_of_those_that_are_kept(tmp_path: Path) -> None:
    saved(tmp_path, 5)
    shutil.copytree(tmp_path / FOLDER, tmp_path / "step-00000099")
    store = CheckpointStore(tmp_path, keep=2)
    assert store.newest(lambda _: None) is not None
    store.save(6, tensors(), {}, {})
    assert store.steps() == [99, 6, 5]
    store.save(99, tensors(), {}, {})  # now it is one of ours
    store.save(100, tensors(), {}, {})
    store.save(101, tensors(), {}, {})
    assert store.steps() == [101, 100]


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_a_damaged_checkpoint_is_set_aside_although_its_name_is_taken(tmp_path: Path, kind: str) -> None:
    store = saved(tmp_path, 5, 6)
    (tmp_path / "step-00000006" / "manifest.json").write_text("{")
    taken = tmp_path / "step-00000006.damaged"
    if kind == "file":
        taken.write_text("mine")
    elif kind == "directory":
        (taken / "mine").mkdir(parents=True)
    else:
        taken.symlink_to(tmp_path / "nowhere")
    notes: list[str] = []
    found = store.newest(notes.append)
    assert found is not None
    assert store.set_aside(newer_than=5) == [f"{tmp_path}/step-00000006.damaged-2"]
    assert store.steps() == [5]
    assert len(notes) == 1
    notes.clear()
    assert store.newest(notes.append) is not None
    assert notes == []
    assert taken.is_symlink() or taken.exists()


@pytest.mark.parametrize("name", [".lock", ".step-00000006.tmp"])
def test_a_link_is_never_written_through(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "run")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("precious")
    target = "folder" if name.startswith(".step") else "precious"
    (tmp_path / "run" / name).symlink_to(tmp_path / target)
    store = CheckpointStore(tmp_path / "run")
    if name == ".lock":
        with pytest.raises(CheckpointError, match=r"\.lock is a symbolic link.*remove it"), store.opened():
            pass
    else:
        store.prepare()
        store.save(6, tensors(), {}, {})
        assert store.steps() == [6, 5]
    assert (tmp_path / target).exists()
    assert (tmp_path / "precious").read_text() == "precious"
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["precious"]


def test_a_lock_that_shares_its_content_with_another_name_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path / "run")
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "run" / ".lock").hardlink_to(tmp_path / "precious")
    with pytest.raises(CheckpointError, match=r"\.lock is a link"), store.opened():
        pass
    assert (tmp_path / "precious").read_text() == "precious"


def test_old_checkpoints_that_are_links_are_removed_without_what_they_lead_to(tmp_path: Path) -> None:
    saved(tmp_path / "run", 5)
    (tmp_path / "run" / FOLDER).rename(tmp_path / FOLDER)
    (tmp_path / "run" / FOLDER).symlink_to(tmp_path / FOLDER)
    store = CheckpointStore(tmp_path / "run", keep=1)
    store.save(6, tensors(), {}, {})
    assert [report.warning for report in store.poll()] == [None]
    assert (store.steps(), len(list((tmp_path / FOLDER).iterdir()))) == ([6], 3)


@pytest.mark.parametrize("url", ["zip://a/b", "zip://a::none", "tar://x", "reference://x", "dir://x"])
def test_an_address_of_an_unusual_driver_is_an_error_of_ours(url: str) -> None:
    for use in (lambda: CheckpointStore(url).prepare(), lambda: CheckpointTensors(url), lambda: is_checkpoint(url)):
        with pytest.raises(CheckpointError, match=url.partition(":")[0]):
            use()


@pytest.mark.full
@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"tokens": -1}, "no usable tokens"),
        ({"tokens": "many"}, "no usable tokens"),
        ({"skipped": None}, "no usable skipped"),
        ({"trackers": [1]}, "no usable trackers"),
        ({"trackers": {"jsonl": 3}}, "no usable trackers"),
        ({"data": 7}, "no usable data"),
        ({"losses": {"loss": "low"}}, "no usable losses"),
        ({"losses": [0.5]}, "no usable losses"),
        ({"data": {"surprise": 1}}, "a position in the data that the dataset cannot read"),
    ],
)
def test_values_of_a_run_that_cannot_be_are_an_error(job: Callable[..., Any], values: Manifest, why: str) -> None:
    run = job("steps=2")
    run.build(note=lambda _: None).train()
    folder = run.run.directory / "checkpoints" / "step-00000002"
    content = json.dumps(json.loads((folder / "state.json").read_text()) | values).encode()
    (folder / "state.json").write_bytes(content)
    facts = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    edit(folder, put("files", "state.json", facts))
    with pytest.raises(CheckpointError, match=why):
        job("steps=4").build(note=lambda _: None).train()


@pytest.mark.thorough
def test_a_checkpoint_that_no_job_saved_is_none_to_resume_from(job: Callable[..., Any]) -> None:
    run = job("steps=2")
    run.build(note=lambda _: None).train()
    edit(run.run.directory / "checkpoints" / "step-00000002", lambda manifest: manifest.pop("job"))
    with pytest.raises(CheckpointError, match="the manifest has no entry 'job'"):
        job("steps=4").build(note=lambda _: None).train()

"""Checkpoints behind an fsspec address: nothing to rename, nothing to lock."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from d9d_core.errors import CheckpointError, SaveError
from d9d_core.job_file.job import Checkpoint as Settings
from d9d_engine.checkpoint.store import CheckpointStore

URL = "memory://bucket/run/checkpoints"


@pytest.fixture(autouse=True)
def files() -> Iterator[fsspec.AbstractFileSystem]:
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    yield memory
    memory.store.clear()


def saved(*steps: int, keep: int | None = None) -> CheckpointStore:
    store = CheckpointStore(URL, keep)
    store.prepare()
    for step in steps:
        store.save(step, {"w": torch.full((3, 2), step), "n": torch.tensor(step)}, {"step": step}, {})
    return store


def step_of(store: CheckpointStore, warnings: list[str]) -> int:
    found = store.newest(warnings.append)
    assert found is not None
    into = {"w": torch.zeros(3, 2, dtype=torch.int64), "n": torch.tensor(0)}
    found.load_into(into)
    assert found.values() == {"step": found.step}
    assert into["w"].unique().tolist() == [found.step] == [into["n"].item()]
    return found.step


@pytest.mark.thorough
def test_what_is_saved_comes_back_and_old_ones_go(files: fsspec.AbstractFileSystem) -> None:
    store = saved(1, 2, 3, keep=2)
    assert step_of(store, []) == 3
    assert [report.location for report in store.poll()] == [f"{URL}/step-0000000{step}" for step in (1, 2, 3)]
    assert sorted(files.ls("/bucket/run/checkpoints", detail=False)) == [
        f"/bucket/run/checkpoints/step-0000000{step}" for step in (2, 3)
    ]


def test_without_a_manifest_there_is_no_checkpoint(files: fsspec.AbstractFileSystem) -> None:
    store = saved(1, 2)
    files.rm_file("/bucket/run/checkpoints/step-00000002/manifest.json")
    warnings: list[str] = []
    assert step_of(store, warnings) == 1
    assert warnings == [
        f"{URL}: step-00000002 is incomplete, because a process was killed during the save, and not used; "
        "step-00000001 is complete"
    ]
    assert store.set_aside(newer_than=1) == [f"{URL}/step-00000002"]
    assert store.steps() == [1]
    assert step_of(saved(2), []) == 2  # the same step again


def test_a_start_after_a_kill_in_the_first_save_begins_anew(files: fsspec.AbstractFileSystem) -> None:
    store = saved(1)
    files.rm_file("/bucket/run/checkpoints/step-00000001/manifest.json")
    warnings: list[str] = []
    assert store.newest(warnings.append) is None
    assert len(warnings) == 1
    assert warnings[0].endswith("not used; no earlier checkpoint exists")
    assert step_of(saved(1), []) == 1


def test_a_flipped_bit_is_noticed(files: fsspec.AbstractFileSystem) -> None:
    store = saved(1, 2)
    path = "/bucket/run/checkpoints/step-00000002/tensors-00000.safetensors"
    content = bytearray(files.cat_file(path))
    content[-1] ^= 1
    files.pipe_file(path, bytes(content))
    warnings: list[str] = []
    assert step_of(store, warnings) == 1
    assert "the checksum of tensors-00000.safetensors is wrong" in warnings[0]


def test_a_save_that_fails_leaves_earlier_ones_and_no_trace(
    files: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(1)
    pipe = type(files).pipe_file

    def refuse(self: object, path: str, *rest: object, **options: object) -> None:
        if path.endswith("manifest.json"):
            raise RuntimeError("503 slow down")  # drivers raise what their client raises
        pipe(self, path, *rest, **options)

    monkeypatch.setattr(type(files), "pipe_file", refuse)
    with pytest.raises(CheckpointError, match="RuntimeError: 503 slow down; earlier checkpoints are unchanged"):
        store.save(2, {"w": torch.zeros(2)}, {}, {})
    assert [path for path in files.find("/bucket") if "step-00000002" in path] == []
    assert step_of(store, []) == 1


def test_an_owner_that_cannot_be_asked_is_a_failure_of_the_storage(
    files: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("could not connect to the endpoint")

    store = saved(1)
    with store.opened():
        with monkeypatch.context() as patch:
            patch.setattr(type(files), "cat_file", refuse)
            with pytest.raises(SaveError, match="could not connect to the endpoint; earlier checkpoints are unchanged"):
                store.save(2, {"w": torch.zeros(2)}, {}, {})
        store.save(2, {"w": torch.zeros(2)}, {}, {})
    assert store.steps() == [2, 1]


def test_whoever_opens_it_last_owns_it_and_the_other_is_told_both_names(files: fsspec.AbstractFileSystem) -> None:
    first, second = saved(1), CheckpointStore(URL)
    with first.opened():
        first.save(2, {"w": torch.zeros(2)}, {}, {})
        with second.opened():
            with pytest.raises(CheckpointError, match=r"was taken over by another training run \(process \d+ on .*\); "
                                                      r"this one is process \d+ on "):  # fmt: skip
                first.save(3, {"w": torch.zeros(2)}, {}, {})
            second.save(3, {"w": torch.ones(2)}, {}, {})
            assert json.loads(files.cat_file("/bucket/run/checkpoints/owner.json"))["process"] > 0
    assert second.steps() == [3, 2, 1]
    assert not files.exists("/bucket/run/checkpoints/owner.json")


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    files: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(1, keep=1)
    store.poll()

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "AccessDenied")

    monkeypatch.setattr(type(files), "rm", refuse)
    store.save(2, {"w": torch.zeros(2)}, {}, {})
    (report,) = store.poll()
    assert report.warning == "an old checkpoint could not be removed: [Errno 13] AccessDenied"
    assert store.steps() == [2]


@pytest.mark.parametrize("url", ["nosuch://x/y", "s3://bucket/x"])
def test_an_address_that_nobody_understands_is_refused(url: str) -> None:
    if importlib.util.find_spec("s3fs") is not None:
        pytest.skip("this machine understands s3 addresses")
    with pytest.raises(CheckpointError, match=f"checkpoints cannot be stored at {url}: "):
        CheckpointStore(url)


def test_the_job_file_takes_directories_and_addresses() -> None:
    run = Path("runs/a")
    assert Settings().location(run) == run / "checkpoints"
    assert Settings(dir="/shared/b").location(run) == Path("/shared/b")
    assert Settings(dir=URL).location(run) == URL

"""Stores of checkpoints on disk and at addresses, their manifests, and the ranks that write shards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_core.plugin import ModelSpec, PeftSpec, Ref
from d9d_weights.checkpoint import stored_model
from d9d_weights.checkpoint.manifest import manifest_bytes, read_manifest, read_state, verify_file
from d9d_weights.checkpoint.stored_model import merger_of, model_of
from d9d_weights.files.local import LocalStore
from d9d_weights.files.remote import RemoteDirectory, RemoteStore, remote_draft
from d9d_weights.files.safetensors import Written
from d9d_weights.graph.mappers import Identity
from d9d_weights.hugging_face import load as load_module
from d9d_weights.hugging_face.load import _groups, _reads, _tasks
from d9d_weights.sharding.shards import LocalShards, Owners, TensorShard, signature


@pytest.fixture
def remote() -> Iterator[RemoteStore]:
    store = RemoteStore("memory://d9d-test-stores/")
    store.forget(store.prepare())
    yield store
    fsspec.filesystem("memory").rm("/d9d-test-stores", recursive=True)


def written(store: Any, name: str, **files: bytes) -> None:
    draft = store.draft(name)
    draft.start()
    for file, content in files.items():
        with draft.create(file) as out:
            out.write(content)
    draft.publish({"last": b"!"})


def test_a_remote_store_lists_reads_and_removes_directories(remote: RemoteStore) -> None:
    assert (str(remote), remote.url) == ("memory://d9d-test-stores",) * 2
    assert remote.names() == []
    written(remote, "a", x=b"1", y=b"22")
    written(remote, "b", x=b"3")
    assert sorted(remote.names()) == ["a", "b"]
    assert remote.location("a") == "memory://d9d-test-stores/a"
    with remote.open("a", "y") as file:
        assert file.read() == b"22"
    draft = remote.draft("a")
    assert (draft.size("y"), draft.size("last"), draft.size("z")) == (2, 1, None)
    assert remote.set_aside("a") == "memory://d9d-test-stores/a"
    assert remote.names() == ["b"]
    remote.remove("b")
    assert remote.names() == []
    probe = remote.prepare()
    assert (remote.is_visible(probe), remote.is_visible("probe-of-another")) == (True, False)
    remote.forget(probe)
    assert not remote.is_visible(probe)
    assert RemoteStore("memory://d9d-nowhere").names() == []


def test_a_draft_replaces_what_an_interrupted_one_left(remote: RemoteStore) -> None:
    written(remote, "a", x=b"1", old=b"2")
    draft = remote.draft("a")
    draft.start()
    assert remote.names() in ([], ["a"])
    assert draft.size("old") is None
    with draft.create("x") as out:
        out.write(b"9")
    draft.discard()
    assert draft.size("x") is None


def test_files_of_a_directory_are_added_below_a_draft(remote: RemoteStore) -> None:
    def save(directory: Path) -> None:
        (directory / "inner").mkdir()
        (directory / "inner" / "one").write_text("1")
        (directory / "two").write_text("22")

    draft = remote.draft("a")
    draft.start()
    assert draft.add(save) == {"inner", "two"}
    assert (draft.size("inner/one"), draft.size("two")) == (1, 2)


def test_the_last_process_that_opens_a_remote_store_owns_it(remote: RemoteStore) -> None:
    other = RemoteStore(remote.url)
    remote.check_owner()
    with remote.owned():
        remote.check_owner()
        draft = remote.draft("a")
        draft.start()
        with other.owned():
            other.check_owner()
            with pytest.raises(
                CheckpointError, match=r"^memory://d9d-test-stores was taken over by another training run"
            ):
                remote.check_owner()
            with pytest.raises(CheckpointError, match="taken over"):
                draft.publish({"last": b"!"})
            draft.discard()  # the directory may be the other process's
        with pytest.raises(CheckpointError, match=r"\(unknown; its owner.json is gone\); this one is process \d+ on "):
            remote.check_owner()
    remote.check_owner()


def test_a_draft_at_an_address_removes_earlier_files_only(remote: RemoteStore) -> None:
    files = fsspec.filesystem("memory")
    files.pipe_file("/d9d-test-stores/model/old", b"1")
    files.pipe_file("/d9d-test-stores/model/mine", b"2")
    draft = remote_draft("memory://d9d-test-stores/model/", lambda names: [name for name in names if name == "old"])
    draft.start()
    with draft.create("new") as out:
        out.write(b"abc")
        out.seek(0)
        out.write(b"x")
    directory = RemoteDirectory("memory://d9d-test-stores/model/")
    assert (directory.names(), directory.read("new"), str(directory)) == (
        ["mine", "new"], b"xbc", "memory://d9d-test-stores/model",
    )  # fmt: skip


def test_a_local_store_keeps_damaged_directories_under_further_names(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "store")
    assert (store.names(), store.is_visible(".probe-1.tmp")) == ([], False)
    probe = store.prepare()
    assert (store.names(), store.is_visible(probe)) == ([], True)
    store.forget(probe)
    assert list(store.directory.iterdir()) == []
    places = []
    for _ in range(3):
        (store.directory / "a").mkdir()
        places.append(Path(store.set_aside("a")).name)
    assert places == ["a.damaged", "a.damaged-2", "a.damaged-3"]
    (store.directory / "b").mkdir()
    (store.directory / "file").write_text("")
    store.remove("b")
    assert sorted(store.names()) == places
    assert store.location("c") == str(tmp_path / "store" / "c")
    (store.directory / "link").symlink_to(tmp_path)
    store.remove("link")
    assert tmp_path.exists()
    with store.owned(), pytest.raises(CheckpointError, match="is in use by another training run"), store.owned():
        pass


# --- manifests --------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(tmp_path: Path) -> tuple[LocalStore, Path]:
    directory = tmp_path / "step-3"
    directory.mkdir()
    (directory / "manifest.json").write_bytes(manifest_bytes(3, {}, {"state.json": Written(2, "0" * 64)}, {"job": {}}))
    return LocalStore(tmp_path), directory


def changed(directory: Path, **values: Any) -> None:
    path = directory / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_manifest_that_cannot_be_used_says_why(checkpoint: tuple[LocalStore, Path]) -> None:
    store, directory = checkpoint

    def problem() -> str:
        with pytest.raises(CheckpointError) as caught:
            read_manifest(store, "step-3")
        begin = f"checkpoint {directory}"
        assert str(caught.value).startswith(begin)
        return str(caught.value).removeprefix(begin)

    assert read_manifest(store, "step-3")["step"] == 3
    changed(directory, step=4)
    assert problem() == ": the checksum of manifest.json is wrong, so the file is damaged"
    changed(directory, version=3)
    assert problem().endswith(" version 3; this d9d reads d9d-checkpoint version 2")
    changed(directory, format="x" * 50)
    assert problem() == f" has the format {'x' * 40} version 3; this d9d reads d9d-checkpoint version 2"
    (directory / "manifest.json").write_text("[1]")
    assert problem() == ": manifest.json is not a JSON object"
    (directory / "manifest.json").write_text("{")
    assert problem().startswith(": manifest.json cannot be read (")
    (directory / "manifest.json").unlink()
    assert problem() == " lacks manifest.json: the checkpoint is incomplete or damaged"


def test_values_of_a_checkpoint_are_an_object(checkpoint: tuple[LocalStore, Path]) -> None:
    store, directory = checkpoint
    for text, said in (
        (None, "cannot be read"), ("{", "cannot be read"), ("[1]", "contains a list"),
    ):  # fmt: skip
        if text is not None:
            (directory / "state.json").write_text(text)
        with pytest.raises(CheckpointError, match=f"step-3: state.json {said}"):
            read_state(store, "step-3")
    (directory / "state.json").write_text('{"a": 1}')
    assert read_state(store, "step-3") == {"a": 1}


def test_files_are_verified_by_size_and_checksum(checkpoint: tuple[LocalStore, Path]) -> None:
    import hashlib

    store, directory = checkpoint
    facts = {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}
    for content, said in (
        (None, " lacks x$"),
        (b"ab", ": x has 2 bytes instead of 3$"),
        (b"abd", ": the checksum of x is wrong, so the file is damaged$"),
    ):
        if content is not None:
            (directory / "x").write_bytes(content)
        with pytest.raises(CheckpointError, match=f"^checkpoint {directory}{said}"):
            verify_file(store, "step-3", "x", facts)
    (directory / "x").write_bytes(b"abc")
    verify_file(store, "step-3", "x", facts)


# --- shards -----------------------------------------------------------------------------------------------------------


def shards(shape: tuple[int, ...], *windows: tuple[tuple[int, ...], tuple[int, ...]]) -> LocalShards:
    made = tuple(TensorShard(offset, torch.zeros(size)) for offset, size in windows)
    return LocalShards(torch.float32, shape, made)


def test_each_shard_is_written_once_and_ranks_write_about_equally_many_bytes() -> None:
    whole = {name: shards((size,), ((0,), (size,))) for name, size in (("big", 8), ("small", 2), ("tiny", 1))}
    own = [{"own": shards((6,), ((3 * rank,), (3,)))} for rank in range(2)]
    ranks = [{**whole, **mine} for mine in own]
    owners = Owners([signature(mine) for mine in ranks])
    written_by = [
        {name: [shard.offset for shard in local.shards] for name, local in owners.own(mine, rank).items()}
        for rank, mine in enumerate(ranks)
    ]
    # Rank 0: 3 of its own and 8; rank 1: 3 of its own, 2 and 1.
    assert written_by == [
        {"big": [(0,)], "small": [], "tiny": [], "own": [(0,)]},
        {"big": [], "small": [(0,)], "tiny": [(0,)], "own": [(3,)]},
    ]
    assert owners.own(ranks[0], 0)["own"] is ranks[0]["own"]
    assert signature(ranks[0])[1] == ["own", "float32", [6], [[[0], [3]]]]


def test_ranks_that_disagree_about_a_tensor_are_named() -> None:
    one, other = {"a": shards((2,), ((0,), (2,)))}, {"a": shards((3,), ((0,), (3,)))}
    with pytest.raises(
        CheckpointError, match=r"^tensor 'a' is float32 \[3\] on rank 1 and float32 \[2\] on an earlier rank"
    ):
        Owners([signature(one), signature(other)])


def test_large_tensors_are_read_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "_TASK_BYTES", 24)

    def tasks(*size: int, keeps: bool = True, offset: tuple[int, ...] = (5, 7)) -> list[Any]:
        value: Any = SimpleNamespace(keeps_rows=keeps)
        shard = TensorShard(offset[: len(size)], torch.zeros(size))
        return [(window.offset, tuple(window.tensor.shape)) for window in _tasks(value, shard)]

    assert tasks(3, 2) == [((5, 7), (3, 2))]
    assert tasks(4, 2) == [((5, 7), (3, 2)), ((8, 7), (1, 2))]
    assert tasks(2, 7) == [((5, 7), (1, 7)), ((6, 7), (1, 7))]
    assert tasks(4, 2, keeps=False) == [((5, 7), (4, 2))]
    assert tasks(9, 0) == [((5, 7), (9, 0))]
    assert tasks() == [((), ())]


def test_a_replica_is_read_by_the_first_rank_of_each_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module.dist, "get_rank", lambda group: {"copies": 2, "first": 0}[group])
    plain: Any = torch.ones(1)
    copies: Any = "copies"
    first: Any = "first"
    assert (_groups(plain, None), _groups(plain, copies)) == ([], [("copies", 2)])
    assert [_reads(plain, group) for group in (None, copies, first)] == [True, False, True]
    monkeypatch.setattr(load_module, "is_dtensor", lambda _tensor: True)
    mesh = SimpleNamespace(
        size=[2, 3, 1, 4].__getitem__, get_group=lambda dim: f"group {dim}", get_local_rank=[0, 1, 0, 3].__getitem__
    )
    placements = [SimpleNamespace(is_replicate=lambda on=on: on) for on in (True, False, True, True)]
    sharded: Any = SimpleNamespace(device_mesh=mesh, placements=placements)
    assert _groups(sharded, copies) == [("group 0", 0), ("group 3", 3)]
    assert not _reads(sharded, None)


# --- models of checkpoints --------------------------------------------------------------------------------------------


def tensors(job: Any, **manifest: Any) -> Any:
    return SimpleNamespace(location="there", manifest={"job": job, **manifest}, specs={"a": 1})


class Entry(SimpleNamespace):
    def __str__(self) -> str:
        return "'x' (acme)"


class Config:
    @staticmethod
    def model_validate(values: Any, context: Any = None) -> Any:
        return values


class Here(Ref):
    def load(self) -> Any:
        return lambda: "layout"


def registry(hugging_face: bool = True) -> Any:
    ref = Here("my:x")
    specs = {
        "model": ModelSpec(name="x", summary="x", config=ref, build=ref, hugging_face=ref if hugging_face else None),
        "peft method": PeftSpec(name="x", summary="x", config=ref, build=ref),
    }
    return SimpleNamespace(find=lambda kind, name: Entry(spec=specs[kind], asked=name))


def test_the_model_of_a_checkpoint_has_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_model, "load_config", lambda _entry: Config)
    job = {"model": {"name": "acme/x", "size": 3, "pretrained": "elsewhere"}}
    found: Any = model_of(tensors(job), registry())
    assert found == ("layout", {"name": "x", "size": 3})
    with pytest.raises(
        CheckpointError, match=r"^there contains model 'x' \(acme\), which has no Hugging Face layout to export$"
    ):
        model_of(tensors(job), registry(hugging_face=False))
    for wrong in ({"model": 3}, {"model": {"name": 3}}, {}):
        with pytest.raises(CheckpointError, match="^there: its manifest names no model"):
            model_of(tensors(wrong), registry())


def test_adapters_of_a_checkpoint_are_merged_if_their_method_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Method:
        def merger(self, names: Any) -> Any:
            return ("merger", sorted(names))

    monkeypatch.setattr(stored_model, "load_config", lambda _entry: Config)
    monkeypatch.setattr(stored_model, "choose", lambda *_: "chosen")
    monkeypatch.setattr(stored_model, "instantiate", lambda _chosen, config: Method() if config["merges"] else object())
    monkeypatch.setattr(stored_model, "MergesTensors", Method)
    assert isinstance(merger_of(tensors({}), registry()), Identity)
    assert isinstance(merger_of(tensors({"peft": None}), registry()), Identity)
    merged: Any = merger_of(tensors({"peft": {"name": "lora", "merges": True}}), registry())
    assert merged == ("merger", ["a"])
    for job, manifest, said in (
        ({}, {"left_out": ["x"]}, "belongs to a fine-tuning run and lacks frozen weights"),
        ({"peft": 3}, {}, "peft in its manifest has no name"),
        ({"peft": {"name": 3}}, {}, "peft in its manifest has no name"),
        ({"peft": {"name": "x", "merges": False}}, {}, r"peft method 'x' \(acme\), which can merge only in memory"),
    ):
        with pytest.raises(CheckpointError, match=said):
            merger_of(tensors(job, **manifest), registry())

"""Rare cases of checkpoints and exports: damaged values, unreadable stores, scalars, strided tensors, nested facts."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_weights.checkpoint import manifest
from d9d_weights.checkpoint import tensors as checkpoint
from d9d_weights.checkpoint.manifest_model import _overlap
from d9d_weights.files import remote
from d9d_weights.graph.compose import Shard
from d9d_weights.hugging_face import load
from d9d_weights.model_card.card import ModelCard, fact_rows
from d9d_weights.templates import process


def test_windows_of_a_scalar_overlap_and_empty_ones_do_not() -> None:
    def overlap(*windows: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
        return _overlap([SimpleNamespace(offset=offset, shape=shape) for offset, shape in windows])  # type: ignore[misc]

    assert not overlap(((), ()))
    assert overlap(((), ()), ((), ()))
    assert not overlap(((0,), (2,)), ((0,), (0,)))
    assert not overlap(((0, 0), (2, 3)), ((0, 3), (2, 1)), ((2, 0), (1, 4)))
    assert overlap(((0, 0), (2, 3)), ((0, 3), (2, 1)), ((1, 3), (1, 1)))


class Store:
    """Store of checkpoints of some steps, of which one cannot be opened."""

    def __init__(self, steps: list[int], failure: OSError | None = None) -> None:
        self.steps, self.failure = steps, failure

    def __str__(self) -> str:
        return "store"

    def location(self, name: str) -> str:
        return f"store/{name}"

    @contextmanager
    def open(self, _name: str, _file: str) -> Any:
        if self.failure is not None:
            raise self.failure
        yield None


def test_a_checkpoint_or_store_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = Store([3], PermissionError("not yours"))
    monkeypatch.setattr(checkpoint, "steps_in", lambda store: store.steps)
    with pytest.raises(CheckpointError, match="^store/step-00000003 cannot be read: not yours$"):
        checkpoint._newest(store)
    store.failure = FileNotFoundError("none")
    with pytest.raises(CheckpointError, match="^store has no complete checkpoint; "):
        checkpoint._newest(store)
    store.failure = None
    monkeypatch.setattr(checkpoint, "read_manifest", lambda _store, name: {"step": int(name.rpartition("-")[2]) % 10})
    store.steps = [13, 4, 3]  # the first is a copy of another step's checkpoint
    assert checkpoint._newest(store) == "step-00000004"

    def unreadable(_store: object) -> list[int]:
        raise OSError("no rights")

    monkeypatch.setattr(checkpoint, "steps_in", unreadable)
    with pytest.raises(
        CheckpointError, match="^store cannot be read: no rights; check the address and your permissions"
    ):
        checkpoint._newest(store)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (OSError("gone"), r"cannot be read \(gone\)"), (ValueError("no JSON"), r"cannot be read \(no JSON\)"),
        ([1], "contains a list"),
    ],
)  # fmt: skip
def test_values_of_a_checkpoint_are_a_readable_json_object(
    values: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_store: object, name: str, _file: str) -> Any:
        assert name == "step-3"
        if isinstance(values, Exception):
            raise values
        return values

    monkeypatch.setattr(manifest, "read_values", read)
    store: Any = Store([])
    with pytest.raises(CheckpointError, match=f"^store/step-3: {manifest.VALUES} {said}"):
        manifest.read_state(store, "step-3")
    monkeypatch.setattr(manifest, "read_values", lambda *_: {"a": 1})
    assert manifest.read_state(store, "step-3") == {"a": 1}


@pytest.mark.parametrize("index", [-1, 2, 3])
def test_a_worker_without_a_share_is_an_error(index: int) -> None:
    mapper: Any = None
    assert (Shard(mapper, 0, 2).index, Shard(mapper, 1, 2).index) == (0, 1)
    with pytest.raises(CheckpointError, match=f"Shard: there is no worker {index} of 2"):
        Shard(mapper, index, 2)


def test_a_strided_tensor_receives_what_its_replicas_have(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def broadcast(tensor: torch.Tensor, group_src: int, group: object) -> None:
        assert tensor.is_contiguous()
        sent.append((group_src, group))
        tensor.add_(1)

    monkeypatch.setattr(load, "_groups", lambda _target, _copies: [("rows", 1), ("columns", 0)])
    monkeypatch.setattr(load.dist, "broadcast", broadcast)
    whole = torch.zeros(2, 3)
    for target in (whole.T, whole):
        load._send(target, None)
    assert whole.tolist() == [[4.0] * 3] * 2
    assert sent == [(0, "rows"), (0, "columns")] * 2
    assert not load._reads(whole, None)


def test_nested_facts_of_data_are_rows_with_the_names_of_all_levels() -> None:
    facts = {
        "samples": 12345,
        "parts_of_it": {"first_one": {"loss": 0.123456, "ok": True}, "none": None},
        "parts": [{"a": 1}, 7],
        "labels": [f"l{number}" for number in range(22)],
        "few": list(range(20)),
    }
    assert list(fact_rows(facts)) == [
        ("samples", "12,345"),
        ("parts of it: first one: loss", "0.1235"),
        ("parts of it: first one: ok", "yes"),
        ("parts of it: none", "none"),
        ("parts 1: a", "1"),
        ("parts 2: ", "7"),
        ("labels", ", ".join([*(f"l{number}" for number in range(20)), "and 2 more"])),
        ("few", ", ".join(map(str, range(20)))),
    ]
    assert "| parts of it: none | none |" in ModelCard({}, {}, 5, data=facts).text().decode()


class Child:
    """Stand-in of a process with pipes, of which the first cannot be flushed."""

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.returncode: int | None = None
        self.stdin = SimpleNamespace(close=self.unsent)
        self.stdout = SimpleNamespace(close=lambda: self.happened.append("closed"))

    def unsent(self) -> None:
        raise BrokenPipeError

    def kill(self) -> None:
        self.happened.append("killed")

    def wait(self) -> None:
        self.happened.append("waited")


def test_only_the_owner_of_a_template_process_ends_it() -> None:
    child: Any = Child()
    process._end(child, os.getpid())
    assert (child.happened, child.returncode) == (["killed", "waited", "closed"], None)
    copy: Any = Child()
    process._end(copy, os.getpid() + 1)
    assert (copy.happened, copy.returncode) == (["closed"], 0)


def test_a_small_remote_file_may_have_the_largest_size_and_no_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(remote, "MAX_JSON_BYTES", 10)
    (tmp_path / "ten.json").write_bytes(b"0123456789")
    (tmp_path / "more.json").write_bytes(b"0123456789a")
    directory = remote.RemoteDirectory(tmp_path.as_uri())
    assert directory.read("ten.json") == b"0123456789"
    with pytest.raises(CheckpointError, match="it has more than 10 bytes, too many for this kind of file"):
        directory.read("more.json")

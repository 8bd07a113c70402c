"""Training goes on while a checkpoint is written."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_engine.checkpoint import save as dcp_save
from d9d_engine.checkpoint import staging
from d9d_engine.checkpoint.staging import Stager
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_weights.sharding.shards import describe


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writing waits until this is set."""
    event = threading.Event()
    write = dcp_save.write_tensors

    def later(*arguments: Any) -> Any:
        assert event.wait(30)
        return write(*arguments)

    monkeypatch.setattr(dcp_save, "write_tensors", later)
    yield event
    event.set()


def load(store: CheckpointStore, **like: torch.Tensor) -> dict[str, torch.Tensor]:
    found = store.newest(print)
    assert found is not None
    tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    found.load_into(tensors)
    return tensors


def test_a_save_returns_before_it_is_written_and_holds_what_was_there_then(
    tmp_path: Path, gate: threading.Event
) -> None:
    store = CheckpointStore(tmp_path, asynchronous=True)
    weight, values = torch.ones(5, 3), {"n": [1]}
    store.save(1, {"w": weight}, values, {})
    store.before_mutation()
    weight.add_(1)
    values["n"].append(2)
    assert (store.steps(), store.poll(), store.failed) == ([], [], False)
    gate.set()
    store.wait()
    (report,) = store.poll()
    assert store.poll() == []
    assert (report.step, report.location) == (1, str(tmp_path / "step-00000001"))
    assert report.bytes == sum(f.stat().st_size for f in (tmp_path / "step-00000001").glob("[st]*"))
    assert report.stall_seconds < report.write_seconds
    assert torch.equal(load(store, w=weight)["w"], torch.ones(5, 3))
    found = store.newest(print)
    assert found is not None
    assert found.values() == {"n": [1]}


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, gate: threading.Event) -> None:
    store = CheckpointStore(tmp_path, asynchronous=True)
    weight = torch.ones(5)
    store.save(1, {"w": weight}, {}, {})
    threading.Timer(0.05, gate.set).start()
    weight.add_(1)
    store.save(2, {"w": weight}, {}, {})
    assert (tmp_path / "step-00000001").is_dir()
    store.wait()
    assert [report.step for report in store.poll()] == [1, 2]
    assert load(store, w=weight)["w"].tolist() == [2] * 5


def test_leaving_the_store_waits(tmp_path: Path, gate: threading.Event) -> None:
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.prepare()
    with store.opened():
        store.save(1, {"w": torch.ones(2)}, {}, {})
        threading.Timer(0.05, gate.set).start()
    assert store.steps() == [1]


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("notice", ["wait", "save", "leave"])
def test_a_failure_is_raised_at_the_next_opportunity_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notice: str
) -> None:
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.prepare()
    text = "could not be written: .*No space left on device; earlier checkpoints are unchanged"
    with monkeypatch.context() as patch:
        patch.setattr(dcp_save, "write_tensors", full)
        if notice == "leave":
            with pytest.raises(CheckpointError, match=text), store.opened():
                store.save(1, {"w": torch.ones(2)}, {}, {})
        else:
            store.save(1, {"w": torch.ones(2)}, {}, {})
            while not store.failed:
                assert store.poll() == []
            with pytest.raises(CheckpointError, match=text):
                store.wait() if notice == "wait" else store.save(2, {"w": torch.ones(2)}, {}, {})
    assert not store.failed
    assert store.steps() == []
    store.save(3, {"w": torch.ones(2)}, {}, {})
    store.wait()
    assert store.steps() == [3]


def test_a_failed_save_does_not_hide_what_ended_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dcp_save, "write_tensors", full)
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.prepare()

    def train() -> None:
        with store.opened():
            store.save(1, {"w": torch.ones(2)}, {}, {})
            raise KeyError("w")

    with pytest.raises(KeyError) as caught:
        train()
    assert "besides, checkpoint" in caught.value.__notes__[0]


def test_copies_lie_in_the_same_memory_each_time() -> None:
    stager = Stager()
    tensors = {"a": torch.rand(3, 4).T, "b": torch.tensor(3), "c": torch.empty(0)}
    first = stager.stage(describe(tensors), frozenset()).ready()
    second = stager.stage(describe(tensors), frozenset()).ready()
    for name, tensor in tensors.items():
        (before,), (after,) = first[name].shards, second[name].shards
        assert torch.equal(after.tensor, tensor)
        assert after.tensor.data_ptr() == before.tensor.data_ptr()
        assert not tensor.numel() or after.tensor.data_ptr() != tensor.data_ptr()
    tensors["a"] = torch.rand(7)
    third = stager.stage(describe(tensors), frozenset()).ready()
    assert torch.equal(third["a"].shards[0].tensor, tensors["a"])


def test_copies_of_an_accelerators_tensors_share_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks: list[torch.Tensor] = []
    empty = torch.empty

    def unpinned(*shape: Any, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        blocks.append(empty(*shape, dtype=dtype))
        return blocks[-1]

    tensors = {name: torch.empty(size, device="meta") for name, size in {"a": 3, "b": 65, "c": 64, "d": 5000}.items()}
    monkeypatch.setattr(staging, "_BLOCK", 1024)
    stager = Stager()
    monkeypatch.setattr(torch, "empty", unpinned)
    stager.reserve(describe(tensors))
    copies = {name: local.shards[0].tensor for name, local in stager._copies.items()}
    first, second = blocks[0].data_ptr(), blocks[1]
    assert [copies[name].data_ptr() - first for name in ("a", "b", "c")] == [0, 256, 768]
    assert copies["d"] is second  # too large to share
    assert len(blocks) == 2


def test_a_save_that_is_waited_for_needs_no_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stager, "stage", full)
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.save(1, {"w": torch.ones(2)}, {}, {}, wait=True)
    assert store.steps() == [1]


def test_a_failure_to_copy_is_a_failure_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(Stager, "stage", no_memory)
    store = CheckpointStore(tmp_path, asynchronous=True)
    store.save(1, {"w": torch.ones(2)}, {}, {})
    with pytest.raises(CheckpointError, match="could not be written: RuntimeError: CUDA error: out of memory"):
        store.wait()


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # torch's own: the debug mode is a prototype
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_nothing_waits_and_the_bytes_are_those_before_the_mutation(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    store = CheckpointStore(tmp_path, asynchronous=True)
    tensors = {
        "big": torch.full((1 << 26,), 1.0, device=device),
        "strided": torch.full((1 << 11, 1 << 11), 1.0, device=device).T,
        "half": torch.full((1001,), 1.0, device=device, dtype=torch.bfloat16),
        "metric": torch.full((17,), 1.0, device=device, dtype=torch.float64),
        "step": torch.tensor(1.0),  # on the host, as some optimizers have it
    }
    matrix = torch.rand(8192, 8192, device=device)
    store.reserve(tensors)
    for step in (1, 2):
        for _ in range(200):
            matrix = (matrix @ matrix).clamp(-1, 1)  # the device is busy for longer than a host can be late
        torch.cuda.set_sync_debug_mode("error")
        try:
            store.save(step, tensors, {}, {}, volatile={"metric"})
            tensors["metric"].add_(1)
            store.before_mutation()
            for name in ("big", "strided", "half"):
                tensors[name].add_(1)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert not torch.cuda.current_stream().query(), "the device was waited for"
        tensors["step"].add_(1)
        store.wait()
        loaded = load(store, **tensors)
        assert {name: tensor.unique().tolist() for name, tensor in loaded.items()} == {key: [step] for key in tensors}

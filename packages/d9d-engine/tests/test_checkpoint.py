from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_engine.checkpoint import save as dcp_save
from d9d_engine.checkpoint.saved import Checkpoint
from d9d_engine.checkpoint.store import CheckpointStore
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

FACTS = {"job": {"model": {}}, "plugins": {}}


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model/weight": torch.randn(3, 5, generator=generator),
        "model/half": torch.randn(4, generator=generator).bfloat16(),
        "optimizer/step": torch.tensor(7.0),
        "metrics/empty": torch.zeros(0, 3, dtype=torch.int64),
        "model/strided": torch.randn(4, 6, generator=generator).T,
    }


def saved(directory: Path, step: int = 5, keep: int | None = None) -> CheckpointStore:
    store = CheckpointStore(directory, keep)
    store.prepare()
    store.save(step, tensors(), {"data": {"consumed": 3}}, FACTS)
    return store


def newest(store: CheckpointStore) -> Checkpoint:
    found = store.newest(lambda _: None)
    assert found is not None
    return found


def test_what_is_saved_comes_back_bit_for_bit(tmp_path: Path) -> None:
    checkpoint = newest(saved(tmp_path))
    loaded = {name: torch.full_like(tensor, 9) for name, tensor in tensors().items()}
    checkpoint.load_into(loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    assert (checkpoint.step, checkpoint.values()) == (5, {"data": {"consumed": 3}})


def test_files_hold_json_and_safetensors_only(tmp_path: Path) -> None:
    saved(tmp_path)
    files = sorted((tmp_path / "step-00000005").iterdir())
    assert [file.name for file in files] == ["manifest.json", "state.json", "tensors-00000.safetensors"]
    for file in files[:2]:
        json.loads(file.read_text())
    assert set(safe_open(files[2], framework="pt").keys()) == set(tensors())


def test_only_the_newest_stay(tmp_path: Path) -> None:
    store = saved(tmp_path, 1, keep=2)
    for step in (2, 10, 9):
        store.save(step, tensors(), {}, FACTS)
    assert [path.name for path in store.paths()] == ["step-00000010", "step-00000009"]


def test_leftovers_of_a_killed_process_are_no_checkpoints_and_are_removed(tmp_path: Path) -> None:
    store = saved(tmp_path)
    for name in (".step-00000099.tmp", "step-99.tmp", "step-abc"):
        (tmp_path / name).mkdir()
    assert newest(store).step == 5
    with store.opened():
        assert not (tmp_path / ".step-00000099.tmp").exists()
        notes: list[str] = []
        store.newest(notes.append)
    assert [note for note in notes if "step-00000099 is incomplete, because a process was killed" in note]


@pytest.mark.parametrize("moment", [1, 2])
def test_a_save_that_fails_while_replacing_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    store = saved(tmp_path)
    rename, calls = Path.rename, iter(range(1, 9))

    def fail(self: Path, target: Path) -> Path:
        if next(calls) == moment:
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(CheckpointError, match="earlier checkpoints are unchanged"):
        store.save(5, tensors(), {"data": {"consumed": 4}}, FACTS)
    monkeypatch.undo()
    assert newest(store).values() == {"data": {"consumed": 3}}


def test_a_process_killed_while_replacing_leaves_the_old_one(tmp_path: Path) -> None:
    store = saved(tmp_path)
    (tmp_path / "step-00000005").rename(tmp_path / ".step-00000005.old.tmp")
    (tmp_path / ".step-00000005.tmp").mkdir()
    with store.opened():
        assert newest(store).step == 5
    assert not list(tmp_path.glob(".*.tmp"))


def test_tensors_that_share_memory_are_refused(tmp_path: Path) -> None:
    store = saved(tmp_path)
    shared = torch.zeros(4)
    with pytest.raises(CheckpointError, match="could not be written: .*a/b.*; earlier checkpoints are unchanged"):
        store.save(6, {"a/b": shared, "a/c": shared.view(2, 2)}, {}, FACTS)


def test_a_value_that_json_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="earlier checkpoints are unchanged"):
        saved(tmp_path).save(6, tensors(), {"data": float("nan")}, FACTS)


@pytest.mark.thorough
@settings(max_examples=60)
@given(st.data())
def test_any_flipped_bit_or_cut_in_any_file_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    directory = tmp_path_factory.mktemp("store")
    store = saved(directory)
    file = data.draw(st.sampled_from(sorted((directory / "step-00000005").iterdir())))
    content = bytearray(file.read_bytes())
    position = data.draw(st.integers(min_value=0, max_value=len(content) - 1))
    if data.draw(st.booleans()):
        del content[position:]
    else:
        content[position] ^= 1 << data.draw(st.integers(min_value=0, max_value=7))
    assume(file.suffix != ".json" or _differs(file.read_bytes(), bytes(content)))
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="no usable checkpoint"):
        store.newest(lambda _: None)


def _differs(before: bytes, after: bytes) -> bool:
    """Whether two JSON files say different things; white space says nothing."""
    try:
        return bool(json.loads(before) != json.loads(after))
    except ValueError:
        return True


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors-00000.safetensors"])
def test_a_missing_file_is_reported_and_the_checkpoint_before_is_used(tmp_path: Path, name: str) -> None:
    store = saved(tmp_path)
    store.save(6, tensors(), {}, FACTS)
    (tmp_path / "step-00000006" / name).unlink()
    warnings: list[str] = []
    found = store.newest(warnings.append)
    assert found is not None
    assert found.step == 5
    assert len(warnings) == 1
    assert name in warnings[0]


def test_without_any_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", None).newest(lambda _: None) is None


def test_other_tensors_are_refused_before_anything_is_copied(tmp_path: Path) -> None:
    checkpoint = newest(saved(tmp_path))
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors().items()}
    target["model/weight"] = torch.zeros(3, 4)
    target["model/new"] = target.pop("model/half")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into(target)
    text = str(caught.value)
    assert "'model/new' is not in the checkpoint" in text
    assert "'model/half' is in the checkpoint only" in text
    assert "'model/weight' is float32 [3, 5] there and float32 [3, 4] here" in text
    assert all(not tensor.any() for tensor in target.values())


def test_some_of_the_tensors_below_a_name_are_loaded_if_others_may_be_left_out(tmp_path: Path) -> None:
    checkpoint, saved_ones = newest(saved(tmp_path)), tensors()
    target = {"model/half": torch.zeros(4, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match="'model/weight' is in the checkpoint only"):
        checkpoint.load_into(target, "model/")
    assert not target["model/half"].any()
    checkpoint.load_into(target, "model/", only=True)
    assert torch.equal(target["model/half"], saved_ones["model/half"])
    with pytest.raises(CheckpointError, match="'model/new' is not in the checkpoint; restore"):
        checkpoint.load_into({"model/new": torch.zeros(4)}, "model/", only=True)


@pytest.mark.parametrize(("count", "more"), [(3, ""), (4, " (and 1 more)"), (5, " (and 2 more)")])
def test_three_differences_are_told_and_others_counted(tmp_path: Path, count: int, more: str) -> None:
    checkpoint = newest(saved(tmp_path))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load_into({f"model/{index}": torch.zeros(1) for index in range(count)}, only=True)
    listed = "; ".join(f"'model/{index}' is not in the checkpoint" for index in range(3))
    assert f"saved by a different job: {listed}{more}; restore" in str(caught.value)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    store = saved(tmp_path)
    path = tmp_path / "step-00000005" / "manifest.json"
    manifest = json.loads(path.read_text()) | {"version": 3}
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        CheckpointError, match="has the format d9d-checkpoint version 3; this d9d reads d9d-checkpoint version 2"
    ):
        store.newest(lambda _: None)


def test_a_save_that_fails_leaves_earlier_checkpoints_and_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved(tmp_path)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dcp_save, "write_tensors", full)
    with pytest.raises(
        CheckpointError, match="could not be written: .*No space left on device; earlier checkpoints are unchanged"
    ):
        store.save(6, tensors(), {}, FACTS)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]
    assert newest(store).step == 5

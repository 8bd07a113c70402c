"""What fails on one rank fails on all of them, with one text, and harms no earlier checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_engine.checkpoint import save as dcp_save
from d9d_engine.checkpoint import store as store_module
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_testing.world import World
from d9d_weights.sharding.agreement import on_all, on_main
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor


def store(directory: str, **options: Any) -> CheckpointStore:
    topology = Topology(rank=dist.get_rank(), world_size=dist.get_world_size())
    return CheckpointStore(directory if "://" in directory else Path(directory), topology=topology, **options)


def sharded(value: float, rows: int = 10) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {"w": distribute_tensor(torch.full((rows, 3), float(value)), mesh, [Shard(0)])}


def text_of(action: Callable[[], object]) -> str | None:
    try:
        action()
    except CheckpointError as error:
        return str(error)
    return None


def no_space(rank: int) -> None:
    """This rank's disk is full."""
    if dist.get_rank() != rank:
        return

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    dcp_save.write_tensors = fail  # type: ignore[assignment]


def save_on_a_full_disk(directory: str, rank: int, asynchronous: bool) -> list[str | None]:
    kept = store(directory, asynchronous=asynchronous)
    tensors = sharded(1.0)
    kept.save(1, tensors, {}, {}, wait=True)
    no_space(rank)
    saved = text_of(lambda: kept.save(2, tensors, {}, {}))
    waited = text_of(kept.wait)
    dist.barrier()
    assert kept.steps() == [1]
    assert not kept.failed
    return [saved, waited]


def prepare_apart(directory: str) -> list[Any]:
    store_module._LATE_FILE = 0.0
    own = Path(directory) / str(dist.get_rank())
    own.mkdir()  # of an earlier run on this machine
    found = text_of(store(str(own)).prepare)
    dist.barrier()
    return [found, [path.name for path in own.iterdir()]]


def test_directories_that_are_not_shared_are_refused_by_all_ranks_before_training(
    world: type[World], tmp_path: Path
) -> None:
    first, second = world(2).run(prepare_apart, str(tmp_path))
    assert first == second == [first[0], []], "the same text, and no file is left"
    assert "is not shared: machine 0 (" in first[0]
    assert "so each has a directory of its own; set run.dir, or checkpoint.dir" in first[0]


@pytest.mark.thorough
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_on_one_rank_is_the_same_error_on_all(
    world: type[World], tmp_path: Path, rank: int, asynchronous: bool
) -> None:
    texts = world(2).run(save_on_a_full_disk, str(tmp_path), rank, asynchronous)
    failed = texts[0][1 if asynchronous else 0]
    assert failed == (
        f"checkpoint {tmp_path}/step-00000002 could not be written: "
        f"rank {rank}: [Errno 28] No space left on device; earlier checkpoints are unchanged"
    )
    assert texts[0] == texts[1] == ([None, failed] if asynchronous else [failed, None])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def save_several(directory: str) -> None:
    kept = store(directory)
    for step in (1, 2):
        kept.save(step, sharded(step), {"step": step}, {})


def choose(directory: str) -> tuple[int, list[str], dict[str, Any]]:
    warnings: list[str] = []
    found = store(directory).newest(warnings.append)
    assert found is not None
    tensors = sharded(0.0)
    found.load_into(tensors)
    assert torch.equal(tensors["w"].full_tensor(), torch.full((10, 3), float(found.step)))  # type: ignore[attr-defined]
    return found.step, warnings, found.values()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.thorough
@pytest.mark.parametrize("file", ["tensors-00000.safetensors", "tensors-00001.safetensors", "state.json"])
@pytest.mark.parametrize(
    ("damage", "text"),
    [(flip, "the checksum of {} is wrong"), (cut, ": {} has "), (Path.unlink, "lacks {}")],
    ids=["bit flip", "truncated", "missing"],
)
def test_all_ranks_pass_over_a_damaged_file_and_one_names_it(
    world: type[World], tmp_path: Path, damage: Callable[[Path], None], text: str, file: str
) -> None:
    world(2).run(save_several, str(tmp_path))
    damage(tmp_path / "step-00000002" / file)
    first, second = world(2).run(choose, str(tmp_path))
    assert (first[0], first[2]) == (second[0], second[2]) == (1, {"step": 1})
    assert (len(first[1]), second[1]) == (1, [])
    assert text.format(file) in first[1][0]


def load_others(directory: str) -> list[str | None]:
    kept = store(directory)
    kept.save(1, {"a": torch.ones(2), "b": torch.ones(3)}, {}, {})
    found = kept.newest(print)
    assert found is not None
    odd = dist.get_rank() == 1
    mine = {"a": torch.zeros(2, dtype=torch.int32 if odd else torch.float32), "b": torch.zeros(3)}
    text = text_of(lambda: found.load_into(mine))
    assert not any(tensor.any() for tensor in mine.values())
    named = {"a": torch.zeros(2)} if odd else {"b": torch.zeros(3)}  # together, as stages of a pipeline, they hold all
    return [text, text_of(lambda: found.load_into(named)), text_of(lambda: found.load_into({"c": torch.ones(1)}, "c"))]


def test_a_tensor_that_differs_on_one_rank_is_refused_on_all_before_anything_is_copied(
    world: type[World], tmp_path: Path
) -> None:
    first, second = world(2).run(load_others, str(tmp_path))
    assert first == second
    assert "saved by a different job: 'a' is float32 [2] there and int32 [2] here; restore" in first[0]
    assert first[1] is None
    assert "'c' is not in the checkpoint" in first[2]


def save_what_differs(directory: str) -> list[str | None]:
    kept = store(directory)
    rank = dist.get_rank()
    shapes = text_of(lambda: kept.save(1, {"a": torch.ones(2 + rank)}, {}, {}))
    shared = torch.zeros(4)
    aliases = {"a": shared, "b": shared[2:] if rank else torch.zeros(4)}
    memory = text_of(lambda: kept.save(1, aliases, {}, {}))
    values = text_of(lambda: kept.save(1, {"a": shared}, {"x": float("nan") if rank == 0 else 0}, {}))
    half = sharded(1.0)
    pieces = text_of(lambda: kept.save(1, half if rank else {}, {}, {}))
    assert kept.steps() == []
    return [shapes, memory, values, pieces]


def test_ranks_that_contradict_each_other_are_told_so(world: type[World], tmp_path: Path) -> None:
    first, second = world(2).run(save_what_differs, str(tmp_path))
    assert first == second
    expected = [
        "tensor 'a' is float32 [3] on rank 1 and float32 [2] on an earlier rank",
        "'a' and 'b' share memory",
        "a component's state cannot be saved as JSON",
        "the saved shards of 'w' have 15 elements, but the tensor has 30",
    ]
    for text, part in zip(first, expected, strict=True):
        assert part in text
    assert list(tmp_path.iterdir()) == []


def train_while_saving(directory: str) -> list[Any]:
    kept = store(directory, asynchronous=True)
    tensors = sharded(0.0, rows=1000)
    kept.reserve(tensors)
    seen = []
    for step in range(1, 6):
        kept.before_mutation()
        tensors["w"].add_(1)
        kept.save(step, tensors, {"step": step}, {})
        for _ in range(20):  # the training's own communication goes on meanwhile
            dist.all_reduce(torch.ones(10))
        seen += [report.step for report in kept.poll()]
    kept.wait()
    reports = kept.poll()
    assert all(report.bytes > 12_000 and report.write_seconds > 0 for report in reports)
    return [*seen, *(report.step for report in reports)]


@pytest.mark.thorough
def test_asynchronous_saves_hold_the_values_of_their_step(world: type[World], tmp_path: Path) -> None:
    assert world(2).run(train_while_saving, str(tmp_path)) == [[1, 2, 3, 4, 5]] * 2
    for step in range(1, 6):
        alone = CheckpointStore(tmp_path)
        found = alone.open(f"step-{step:08d}")
        loaded = torch.zeros(1000, 3)
        found.load_into({"w": loaded})
        assert torch.equal(loaded, torch.full((1000, 3), float(step)))


def use_twice(directory: str) -> list[str | None]:
    first = store(directory)
    first.prepare()
    with first.opened():
        return [text_of(lambda: store(directory).opened().__enter__())]


def test_a_second_run_is_refused_on_all_its_ranks(world: type[World], tmp_path: Path) -> None:
    texts = world(2).run(use_twice, str(tmp_path))
    assert texts[0] == texts[1]
    assert "is in use by another training run" in texts[0][0]


def save_behind_an_address(url: str) -> None:
    kept = store(url, keep=1)
    kept.prepare()
    with kept.opened():
        for step in (1, 2):
            kept.save(step, sharded(step), {"step": step}, {})


@pytest.mark.thorough
def test_several_ranks_save_behind_an_address(world: type[World], tmp_path: Path) -> None:
    world(2).run(save_behind_an_address, f"file://{tmp_path}/store")
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["step-00000002"]
    assert world(2).run(choose, f"file://{tmp_path}/store") == [(2, [], {"step": 2})] * 2


def agree() -> list[Any]:
    rank = dist.get_rank()

    def fail_on(ranks: set[int]) -> int:
        if rank in ranks:
            raise OSError(5, "Input/output error")
        return rank

    group = dist.group.WORLD
    return [
        on_all(lambda: rank, group),
        on_main(lambda: {"rank": rank}, group),
        text_of(lambda: on_all(lambda: fail_on({1}), group)),
        text_of(lambda: on_all(lambda: fail_on({0, 1}), group)),
        text_of(lambda: on_main(lambda: fail_on({0}), group)),
        on_main(lambda: fail_on({1}), group),
    ]


def test_ranks_agree_on_results_and_failures(world: type[World]) -> None:
    results = world(2).run(agree)
    io = "[Errno 5] Input/output error"
    common = [{"rank": 0}, f"rank 1: {io}", f"rank 0: {io}; rank 1: {io}", io, 0]
    assert results == [[0, *common], [1, *common]]

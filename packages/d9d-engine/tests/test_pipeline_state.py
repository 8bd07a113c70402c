"""Checkpoints and weights of models whose stages are on several ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from d9d_core.errors import CheckpointError
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.distributed.mesh import Topology
from d9d_testing.world import World
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.graph.mappers import Identity
from d9d_weights.hugging_face.load import load_tensors
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

LAYERS = 5
#: Layers of each stage. The first and the last also hold a copy of the embedding.
SPLITS: dict[str, tuple[int, ...]] = {"whole": (5,), "even": (3, 2), "other": (1, 4), "four": (2, 1, 1, 1)}

#: Tensors of a stage are repeated on all its ranks, or sharded over them.
KINDS = ("plain", "sharded")


def values(step: int) -> dict[str, Tensor]:
    """The whole state after some steps: weights, and one moment of each."""
    numbers = torch.Generator().manual_seed(step)
    names = ["embedding", *(f"layers.{index}" for index in range(LAYERS)), "norm"]
    weights = {f"model/{name}": torch.randn(6, 4, generator=numbers) for name in names}
    moments = {f"optimizer/{name}/m": torch.randn(6, 4, generator=numbers) for name in names}
    return weights | moments


def names_of(split: Sequence[int], stage: int) -> set[str]:
    first = sum(split[:stage])
    names = {f"layers.{index}" for index in range(first, first + split[stage])}
    names |= {"embedding"} if stage in (0, len(split) - 1) else set()
    names |= {"norm"} if stage == len(split) - 1 else set()
    return {f"model/{name}" for name in names} | {f"optimizer/{name}/m" for name in names}


def mine(whole: Mapping[str, Tensor], split: Sequence[int], sharded: bool) -> dict[str, Tensor]:
    """What this rank holds of it; with more ranks than stages, each stage is repeated or sharded along dp."""
    mesh = init_device_mesh("cpu", (len(split), dist.get_world_size() // len(split)), mesh_dim_names=("pp", "dp"))
    names = names_of(split, mesh["pp"].get_local_rank())
    held = {name: tensor.clone() for name, tensor in whole.items() if name in names}
    if not sharded:
        return held
    return {name: distribute_tensor(t, mesh["dp"], [Shard(0)], src_data_rank=None) for name, t in held.items()}


def open_store(directory: str, asynchronous: bool = False) -> CheckpointStore:
    topology = Topology(rank=dist.get_rank(), world_size=dist.get_world_size())
    return CheckpointStore(Path(directory), topology=topology, asynchronous=asynchronous)


def resume(directory: str, split: str, step: int, sharded: bool, asynchronous: bool) -> None:
    """Load what there is, expect it to be of the step before, and save this one. Runs on every rank."""
    store = open_store(directory, asynchronous)
    if step > 1:
        found = store.newest(print)
        assert found is not None
        assert found.step == step - 1
        loaded = mine({name: torch.zeros_like(t) for name, t in values(1).items()}, SPLITS[split], sharded)
        for scope in ("model/", "optimizer/"):
            found.load_into({name: tensor for name, tensor in loaded.items() if name.startswith(scope)}, scope)
        expected = mine(values(step - 1), SPLITS[split], sharded)
        for name, tensor in loaded.items():
            here, there = (t.to_local() if isinstance(t, DTensor) else t for t in (tensor, expected[name]))
            assert torch.equal(here, there), name
    state = mine(values(step), SPLITS[split], sharded)
    if asynchronous:
        store.reserve(state)
    store.save(step, state, {}, {})
    store.before_mutation()
    for tensor in state.values():  # as training would, while the save goes on
        tensor.zero_()
    store.wait()


def resume_both(directory: str, split: str, step: int, asynchronous: bool) -> None:
    for kind in KINDS:
        resume(f"{directory}/{kind}", split, step, kind == "sharded", asynchronous)


@pytest.mark.full
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_a_run_resumes_with_other_stages(world: type[World], tmp_path: Path, asynchronous: bool) -> None:
    for step, (split, ranks) in enumerate([("even", 4), ("whole", 1), ("other", 2), ("four", 4)], start=1):
        world(ranks).run(resume_both, str(tmp_path), split, step, asynchronous)
        for kind in KINDS:
            manifest = json.loads((tmp_path / kind / f"step-{step:08d}" / "manifest.json").read_text())
            assert manifest["tensors"].keys() == values(step).keys()
            # The copies of the embedding are written once.
            shards = ranks // len(SPLITS[split]) if kind == "sharded" else 1
            assert len(manifest["tensors"]["model/embedding"]["pieces"]) == shards


def save_and_lose_a_layer(directory: str) -> list[str]:
    store = open_store(directory)
    state = mine(values(1), SPLITS["even"], sharded=False)
    store.save(1, state, {}, {})
    found, texts = store.newest(print), []
    assert found is not None
    less = {name: tensor for name, tensor in state.items() if name != "model/layers.4"}
    more = state | ({"model/new": torch.ones(1)} if dist.get_rank() == 1 else {})
    for wrong in (less, more):
        with pytest.raises(CheckpointError) as caught:
            found.load_into(wrong)
        texts.append(str(caught.value))
    return texts


@pytest.mark.thorough
def test_what_no_stage_wants_and_what_no_checkpoint_has_is_an_error_on_all_ranks(
    world: type[World], tmp_path: Path
) -> None:
    first, second = world(2).run(save_and_lose_a_layer, str(tmp_path))
    assert first == second
    assert "'model/layers.4' is in the checkpoint only" in first[0]
    assert "'model/new' is not in the checkpoint" in first[1]


# --- weights in another layout


class Memory:
    """Tensors in memory, read by windows; one of them may be damaged."""

    def __init__(self, tensors: Mapping[str, Tensor], damaged: str = "") -> None:
        self.tensors = tensors
        self.damaged = damaged
        self.numbers = 0

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        if name == self.damaged:
            raise CheckpointError(f"{name} cannot be read")
        self.numbers += into.numel()
        into.copy_(self.tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, into.shape, strict=True))])


def load_stages() -> list[int]:
    """Each stage of two reads its own weights; returns how many numbers this rank read, in each way."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    graph, read = StateGraph(Identity(), specs_of(values(1))), []
    for once, kind in product((False, True), KINDS):
        source = Memory(values(1))
        zeros = {name: torch.zeros_like(tensor) for name, tensor in values(1).items()}
        targets = mine(zeros, SPLITS["other"], kind == "sharded")
        load_tensors(graph, source, targets, once=once, copies=mesh["dp"].get_group(), group=dist.group.WORLD)
        for name, target in targets.items():
            whole = target.full_tensor() if isinstance(target, DTensor) else target
            assert torch.equal(whole, values(1)[name]), (once, kind, name)
        read.append(source.numbers)
    return read


@pytest.mark.thorough
def test_each_stage_reads_its_own_weights_and_of_equal_ranks_one_if_asked(world: type[World]) -> None:
    first, last = (24 * len(names_of(SPLITS["other"], stage)) for stage in (0, 1))
    found = world(4).run(load_stages)
    assert found[:2] == [[first, first // 2, first, first // 2], [first, first // 2, 0, first // 2]]
    assert found[2:] == [[last, last // 2, last, last // 2], [last, last // 2, 0, last // 2]]


def load_damaged() -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    source = Memory(values(1), damaged="model/layers.4")  # of the last stage only
    graph, texts = StateGraph(Identity(), specs_of(values(1))), []
    for once in (False, True):
        targets = mine(values(1), SPLITS["even"], sharded=False)
        with pytest.raises(CheckpointError) as caught:
            load_tensors(graph, source, targets, once=once, copies=mesh["dp"].get_group(), group=dist.group.WORLD)
        texts.append(str(caught.value))
    return texts


def test_a_stage_that_cannot_read_fails_all_with_one_text(world: type[World]) -> None:
    assert world(4).run(load_damaged) == [["model/layers.4 cannot be read"] * 2] * 4

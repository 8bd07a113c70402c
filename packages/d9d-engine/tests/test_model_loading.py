"""From files into any layout, and from any layout into files."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from d9d_core.errors import CheckpointError, JobError
from d9d_engine.checkpoint.store import CheckpointStore
from d9d_engine.job import Job
from d9d_testing.layouts import job_of, topology_here
from d9d_testing.toy.runs import final_tensors, metrics_of, noted, quiet
from d9d_weights.checkpoint.tensors import CheckpointTensors
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compute import Compute
from d9d_weights.graph.graph import StateGraph, map_tensors, specs_of
from d9d_weights.graph.mappers import Cast, Identity, Rename, Transpose
from d9d_weights.graph.merging import Chunk, Concatenate, Stack
from d9d_weights.graph.select import Drop, Fresh
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.load import load_tensors
from d9d_weights.hugging_face.writer import ModelWriter
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MakeJob = Callable[..., Job]


def stored_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"gate": (6, 8), "up": (6, 8), "norm": (8,), "bias": (), "embed": (12, 8)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return (
        tensors
        | {f"experts.{i}.w": torch.randn(4, 6, generator=generator) for i in range(6)}
        | {"unused": torch.ones(2)}
    )


def mapper() -> Mapper:
    return Parallel(
        Concatenate(["gate", "up"], "ffn") >> Transpose("ffn"),
        Stack([f"experts.{i}.w" for i in range(6)], "bank") >> Transpose("bank"),
        Chunk("embed", ["regular", "added"], sizes=[9, 3]),
        Cast("norm", torch.bfloat16, back=torch.float32),
        Rename("bias", "offset"),
        Drop("unused"),
        Fresh(("head",)),
    )


class Counting:
    """A directory that counts the numbers it gives out."""

    def __init__(self, directory: ModelDirectory) -> None:
        self.directory = directory
        self.numbers = 0

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        self.numbers += into.numel()
        self.directory.read(name, offset, into)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A model in two files."""
    directory = tmp_path / "stored"
    directory.mkdir()
    tensors = stored_tensors()
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:6]}, directory / "model-00001-of-00002.safetensors")
    save_file({name: tensors[name] for name in names[6:]}, directory / "model-00002-of-00002.safetensors")
    weight_map = {name: f"model-0000{1 + (name in names[6:])}-of-00002.safetensors" for name in names}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory


def random_placements(seed: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    choice = random.Random(f"{seed} {shape}")
    dims = [None, *range(len(shape))]
    picked = [choice.choice(dims) for _ in range(2)]
    return tuple(Replicate() if dim is None else Shard(dim) for dim in picked)


def load_in_layouts(directory: str, once: bool) -> int:
    """Load into random layouts of four ranks; runs on every rank; returns how many numbers were read."""
    mesh = init_device_mesh("cpu", (2, 2))
    expected = map_tensors(mapper(), stored_tensors())
    with ModelDirectory.open(directory) as opened:
        source = Counting(opened)
        graph = StateGraph(mapper(), opened.specs)
        for seed in range(6):
            targets = {
                name: distribute_tensor(torch.zeros_like(t).float(), mesh, random_placements(seed, tuple(t.shape)))
                for name, t in expected.items()
            } | {"offset": torch.zeros(())}
            load_tensors(graph, source, targets, threads=2, once=once, copies=dist.group.WORLD)
            for name, target in targets.items():
                whole = target.full_tensor() if isinstance(target, DTensor) else target
                assert torch.equal(whole, expected[name].float()), (seed, name)
    return source.numbers


@pytest.mark.thorough
@pytest.mark.parametrize("once", [False, True], ids=["each reads", "one reads"])
def test_ranks_read_what_they_hold_in_any_layout(stored: Path, world: Any, once: bool) -> None:
    numbers = world(4).run(load_in_layouts, str(stored), once)
    whole = 6 * sum(t.numel() for t in map_tensors(mapper(), stored_tensors()).values())
    if once:
        assert sum(numbers) == whole
    else:
        assert whole < sum(numbers) < 4 * whole
        assert max(numbers) < whole


class Memory:
    """Tensors in memory, read by windows."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        into.copy_(self.tensors[name][tuple(slice(o, o + n) for o, n in zip(offset, into.shape, strict=True))])


def load_under_fsdp_and_tensor_parallelism() -> list[str]:
    """Rows sharded twice lie in several pieces on a rank; runs on every rank; returns the kinds of placements."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(7, 10), nn.Linear(10, 6))
    expected = {name: torch.arange(float(p.numel())).reshape(p.shape) for name, p in model.named_parameters()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    targets = dict(model.named_parameters())
    for once in (False, True):
        for target in targets.values():
            target.detach().to_local().zero_()  # type: ignore[attr-defined]
        graph = StateGraph(Identity(), specs_of(expected))
        load_tensors(graph, Memory(expected), targets, once=once, group=dist.group.WORLD)
        for name, target in targets.items():
            assert torch.equal(target.full_tensor(), expected[name]), (once, name)  # type: ignore[attr-defined]
    return [type(p).__name__ for target in targets.values() for p in target.placements]  # type: ignore[attr-defined]


@pytest.mark.thorough
def test_rows_that_are_sharded_twice_are_read(world: Any) -> None:
    kinds = world(4).run(load_under_fsdp_and_tensor_parallelism)[0]
    assert {"_StridedShard", "Shard", "Replicate"} == set(kinds)


def test_numbers_become_the_targets_format_after_the_graphs(stored: Path) -> None:
    """A cast in the graph rounds, even if the target is wider."""
    with ModelDirectory.open(stored) as directory:
        graph = StateGraph(mapper(), directory.specs)
        target = {"norm": torch.zeros(8, dtype=torch.float64), "ffn": torch.zeros(8, 12, dtype=torch.bfloat16)}
        load_tensors(graph, directory, target)
    expected = map_tensors(mapper(), stored_tensors())
    assert torch.equal(target["norm"], stored_tensors()["norm"].bfloat16().double())
    assert torch.equal(target["ffn"], expected["ffn"].bfloat16())


def test_large_tensors_are_read_in_parts_and_bytes_are_told(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("d9d_weights.hugging_face.load._TASK_BYTES", 64)
    told: list[int] = []
    expected = map_tensors(mapper(), stored_tensors())
    targets = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    with ModelDirectory.open(stored) as directory:
        load_tensors(StateGraph(mapper(), directory.specs), directory, targets, on_bytes=told.append)
    assert all(torch.equal(targets[name], tensor) for name, tensor in expected.items())
    assert sum(told) == sum(tensor.nbytes for tensor in expected.values())
    assert len(told) > len(expected)


def test_functions_of_whole_tensors_fill_shards(stored: Path) -> None:
    fold = Compute(("gate", "up"), lambda t: {"sum": t["gate"] + t["up"]}, lambda specs: {"sum": specs["gate"]})
    target = {"sum": torch.zeros(6, 8)}
    with ModelDirectory.open(stored) as directory:
        load_tensors(StateGraph(Parallel(fold, Identity()), directory.specs), directory, target)
    assert torch.equal(target["sum"], stored_tensors()["gate"] + stored_tensors()["up"])


def test_a_read_that_fails_ends_the_load(stored: Path) -> None:
    class Broken:
        def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
            raise CheckpointError(f"{name} cannot be read")

    targets = {name: torch.zeros_like(t) for name, t in map_tensors(mapper(), stored_tensors()).items()}
    with ModelDirectory.open(stored) as directory, pytest.raises(CheckpointError, match="cannot be read"):
        load_tensors(StateGraph(mapper(), directory.specs), Broken(), targets)


class BrokenAt:
    """A directory of which one tensor cannot be read."""

    def __init__(self, directory: ModelDirectory, name: str) -> None:
        self.directory = directory
        self.name = name

    def read(self, name: str, offset: Sequence[int], into: Tensor) -> None:
        if name == self.name:
            raise CheckpointError(f"{name} cannot be read")
        self.directory.read(name, offset, into)


def load_with_a_broken_reader(directory: str, once: bool) -> str:
    """Only the first rank cannot read; runs on every rank; returns what each of them is told."""
    mesh = init_device_mesh("cpu", (2,))
    with ModelDirectory.open(directory) as opened:
        source = BrokenAt(opened, "gate" if dist.get_rank() == 0 else "")
        expected = map_tensors(mapper(), stored_tensors())
        targets = {name: distribute_tensor(torch.zeros_like(t), mesh, (Replicate(),)) for name, t in expected.items()}
        with pytest.raises(CheckpointError) as caught:
            load_tensors(
                StateGraph(mapper(), opened.specs), source, targets, once=once, copies=mesh.get_group(),
                group=dist.group.WORLD,
            )  # fmt: skip
    return str(caught.value)


@pytest.mark.parametrize("once", [False, True], ids=["each reads", "one reads"])
def test_a_rank_that_cannot_read_fails_all_with_one_text(stored: Path, world: Any, once: bool) -> None:
    assert world(2).run(load_with_a_broken_reader, str(stored), once) == ["gate cannot be read"] * 2


# --- export


def exported(directory: str, seed: int, shard_bytes: int) -> None:
    """Write the stored tensors from a random layout; runs on every rank."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()))
    model = map_tensors(mapper(), stored_tensors())
    tensors: dict[str, Tensor] = {
        name: distribute_tensor(tensor, mesh, random_placements(seed, tuple(tensor.shape))) if tensor.ndim else tensor
        for name, tensor in model.items()
    }
    tensors["head"] = torch.ones(1)
    graph = StateGraph(mapper().inverse(), specs_of(tensors))
    files = ModelFiles({"model_type": "x"}, {"generation_config.json": b"{}"}, lambda d: _touch(d / "vocab.txt"))
    export_model(ModelWriter(directory, graph.specs, shard_bytes), graph, tensors, files, dist.group.WORLD)


def _touch(path: Path) -> None:
    path.write_text("x")


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(directory.iterdir())}


@pytest.mark.thorough
def test_every_layout_exports_the_same_bytes(tmp_path: Path, world: Any) -> None:
    """Merged tensors, sharded in any way, over files of several ranks."""
    found = []
    for number, (ranks, seed) in enumerate(((1, 0), (2, 1), (2, 2), (4, 3))):
        world(ranks).run(exported, str(tmp_path / f"{number}"), seed, 300)
        found.append(digests(tmp_path / f"{number}"))
    assert found[1:] == found[:1] * 3
    assert len([name for name in found[0] if name.startswith("model-")]) > 3
    assert {"config.json", "generation_config.json", "vocab.txt", "model.safetensors.index.json"} <= found[0].keys()
    read: dict[str, Tensor] = {}
    for file in (tmp_path / "0").glob("*.safetensors"):
        read |= load_file(file)
    original = {name: t for name, t in stored_tensors().items() if name != "unused"}
    original["norm"] = original["norm"].bfloat16().float()
    assert read.keys() == original.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in original.items())


def fail_on_one_rank(directory: str) -> None:
    rank = dist.get_rank()
    tensors = {f"w{i}": torch.ones(4) for i in range(4)}
    graph = StateGraph(Identity(), specs_of(tensors))
    writer = ModelWriter(directory, graph.specs, 16)
    if rank == 1:
        writer.open_shard = _no_space  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no space"):
        export_model(writer, graph, tensors, ModelFiles({}), dist.group.WORLD)


def _no_space(_file: str) -> Any:
    raise CheckpointError("there is no space left")


def test_a_rank_that_cannot_write_fails_all_and_leaves_nothing(tmp_path: Path, world: Any) -> None:
    world(2).run(fail_on_one_rank, str(tmp_path / "model"))
    assert list(tmp_path.iterdir()) == []


# --- jobs


@pytest.fixture
def trained(job: MakeJob) -> Path:
    """An exported toy model that is four wide and three deep."""
    run = job("run.name=first", "steps=2", model={"name": "toy_model", "blocks": 3})
    quiet(run).train()
    return run.run.directory / "model"


@pytest.mark.thorough
def test_a_job_starts_from_published_weights_without_naming_sizes(job: MakeJob, trained: Path) -> None:
    (trained / "generation_config.json").write_text('{"top_k": 3}')
    second = job("steps=1", model={"name": "toy_model", "blocks": 3, "pretrained": str(trained)})
    assert second.model.features == 4  # type: ignore[attr-defined]
    trainer, notes = noted(second)
    weights = {name: p.detach().clone() for name, p in trainer.stage.named_parameters()}
    files = load_file(trained / "model.safetensors")
    assert all(torch.equal(files[f"toy.{name}"], weight) for name, weight in weights.items())
    assert any(note.startswith("pretrained: ") and str(trained) in note for note in notes)
    trainer.train()
    assert json.loads((second.run.directory / "model" / "generation_config.json").read_text()) == {"top_k": 3}
    again = job("steps=3", "export=false", model={"name": "toy_model", "blocks": 3})  # the same run, resumed
    quiet(again).train()
    assert metrics_of(again)[-1]["step"] == 3
    assert final_tensors(again).keys() >= {f"model/{name}" for name in weights}


def test_a_run_ends_well_although_the_weights_it_started_from_are_gone(job: MakeJob, trained: Path) -> None:
    """What an export keeps was read at the start; to go on without them, the error says how."""
    (trained / "generation_config.json").write_text('{"top_k": 3}')
    model = {"name": "toy_model", "blocks": 3, "pretrained": str(trained)}
    second = job("steps=1", model=model)
    trainer, _ = noted(second)
    shutil.rmtree(trained)
    trainer.train()
    assert (second.run.directory / "model" / "generation_config.json").is_file()
    with pytest.raises(
        JobError,
        match=r"To resume a run from its checkpoints, run its job.yaml with model.pretrained set to null",
    ):
        job("steps=2", model=model)
    resolved = yaml.safe_load((second.run.directory / "job.yaml").read_text())
    quiet(job("steps=2", model=resolved["model"] | {"pretrained": None})).train()
    assert metrics_of(second)[-1]["step"] == 2


def open_on_ranks(first: str, second: str, runs: str) -> str:
    """Each rank has a path of its own; runs on every rank."""
    values = {
        "run": {"dir": runs},
        "steps": 1,
        "device": "cpu",
        "mesh": {"dp_replicate": 2},
        "parallel": ["replicate"],
        "batch": {"size": 4},
        "model": {"name": "toy_model", "blocks": 3, "pretrained": first},
        "task": "toy_task",
        "data": "toy_data",
        "optimizer": "toy_optimizer",
    }
    mine = job_of(values, ["d9d_testing.toy.plugin", "d9d_parallel.plugin"])
    if dist.get_rank() == 1:
        mine = mine.model_copy(update={"model": mine.model.model_copy(update={"pretrained": second})}).use(
            mine.registry
        )
    with pytest.raises(CheckpointError) as caught:
        mine.build(lambda _note: None, topology_here(mine))
    return str(caught.value)


@pytest.mark.thorough
def test_weights_that_one_rank_does_not_see_are_an_error_of_all(trained: Path, tmp_path: Path, world: Any) -> None:
    pytest.importorskip("d9d_parallel")
    said = world(2).run(open_on_ranks, str(trained), str(tmp_path / "nowhere"), str(tmp_path / "runs"))
    assert said[0] == said[1]
    assert "nowhere" in said[0]


def test_the_plan_compares_the_weights_with_the_model(job: MakeJob, trained: Path) -> None:
    model = {"name": "toy_model", "pretrained": str(trained)}
    assert job(model={**model, "blocks": 3}).plan().pretrained == f"5 tensors from {trained} fit"
    with pytest.raises(CheckpointError, match=r"gives 'layers.2.weight', which the model does not have"):
        job(model={**model, "blocks": 2}).plan()
    with pytest.raises(CheckpointError, match=r"needs 'layers.3.weight', which the checkpoint does not give"):
        job(model={**model, "blocks": 4}).plan()
    with pytest.raises(CheckpointError, match=r"has the shape \[4, 4\] in the checkpoint .* but \[8, 8\] in the model"):
        job(model={**model, "blocks": 3, "features": 8}).plan()


@pytest.mark.parametrize(
    ("prepare", "text"),
    [
        (lambda d: (d / "config.json").unlink(), "config.json of .* cannot be read"),
        (lambda d: (d / "config.json").write_text("[1]"), "is not a JSON object"),
        (lambda d: (d / "config.json").write_text("{"), "is not valid JSON"),
        (lambda d: (d / "config.json").write_text("[" * 10**5), "is not valid JSON"),
        (
            lambda d: (d / "config.json").write_text('{"model_type": "toy"}'),
            "format failed to read the config.json of .*KeyError",
        ),
        (
            lambda d: (d / "config.json").write_text("{}"),
            "model_type in its config.json is None, which model 'toy_model' .* does not",
        ),
    ],
)
def test_a_config_that_cannot_be_read_is_an_error_of_the_job_file(
    job: MakeJob, trained: Path, prepare: Callable[[Path], object], text: str
) -> None:
    prepare(trained)
    with pytest.raises(JobError, match=text):
        job(model={"name": "toy_model", "pretrained": str(trained)})


# --- checkpoints as sources


def save_sharded(directory: str, tensors: Mapping[str, Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    from d9d_engine.distributed.mesh import Topology

    store = CheckpointStore(Path(directory), topology=Topology(rank=dist.get_rank(), world_size=2))
    placed = {f"model/{n}": distribute_tensor(t, mesh, (Shard(t.ndim - 1),)) for n, t in tensors.items() if t.ndim}
    store.save(7, {**placed, "optimizer/x": torch.ones(1)}, {}, {})


def test_a_checkpoint_of_any_layout_is_read_by_windows(tmp_path: Path, world: Any) -> None:
    tensors = {name: tensor for name, tensor in stored_tensors().items() if tensor.ndim}
    world(2).run(save_sharded, str(tmp_path / "checkpoints"), tensors)
    for location in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step-00000007"):
        with CheckpointTensors(location, "model/") as source:
            assert source.specs == specs_of(tensors)
            for name, tensor in tensors.items():
                window = tuple(slice(size // 3, size) for size in tensor.shape)
                into = torch.zeros(tensor[window].shape, dtype=torch.float64)
                source.read(name, [part.start for part in window], into)
                assert torch.equal(into, tensor[window].double())
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        CheckpointTensors(tmp_path / "nowhere")

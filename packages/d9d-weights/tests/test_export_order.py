"""Two ranks agree about the order of everything, however Python hashes strings in each of them."""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from d9d_weights.graph.base import Parallel
from d9d_weights.graph.compose import Prefix
from d9d_weights.graph.graph import StateGraph, specs_of
from d9d_weights.graph.mappers import Transpose
from d9d_weights.graph.merging import Chunk, Concatenate, Stack
from d9d_weights.hugging_face.export import ModelFiles, export_model
from d9d_weights.hugging_face.writer import ModelWriter
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

LAYERS, RANKS = 6, 2


def export(directory: str, seed: int) -> None:
    """Merge tensors that are sharded at random, over files of both ranks; runs on every rank."""
    layer = Parallel(
        Concatenate(["gate", "up", "down"], "merged") >> Transpose("merged"),
        Stack(["key", "value"], "kv"),
        Chunk("words", ["regular", "added"], sizes=[3, 1]),
    )
    mapper = Parallel(*(Prefix(f"ours.{n}.", f"theirs.{n}.", layer) for n in range(LAYERS)))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    numbers, choice = torch.Generator().manual_seed(0), random.Random(seed)
    tensors: dict[str, Tensor] = {}
    for n in range(LAYERS):
        for name in ("gate", "up", "down", "key", "value", "words"):
            tensor = torch.randn(4, 6, generator=numbers)
            placement = choice.choice([Replicate(), Shard(0), Shard(1)])
            tensors[f"ours.{n}.{name}"] = distribute_tensor(tensor, mesh, [placement])
    graph = StateGraph(mapper, specs_of(tensors))
    writer = ModelWriter(directory, graph.specs, shard_bytes=2000)
    assert len(writer.files) > 1
    export_model(writer, graph, tensors, ModelFiles({"model_type": "x"}), dist.group.WORLD)


def digest(directory: Path) -> str:
    found = hashlib.sha256()
    for file in sorted(directory.iterdir()):
        found.update(file.name.encode() + file.read_bytes())
    return found.hexdigest()


def launch(directory: Path, number: int) -> str:
    """Two fresh interpreters, each with a hash seed of its own; a digest of their files."""
    target, store = directory / "model", directory / "store"
    processes = []
    for rank in range(RANKS):
        environ = os.environ | {"PYTHONHASHSEED": str(2 * number + rank + 1), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, str(target), str(store), str(rank), str(number)]
        processes.append(subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate(timeout=600)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(errors)
    return digest(target)


def compare(tmp_path: Path, launches: int) -> None:
    found = set()
    for number in range(launches):
        directory = tmp_path / f"{number}"
        directory.mkdir()
        found.add(launch(directory, number))
    assert len(found) == 1


@pytest.mark.full
def test_hash_seeds_do_not_change_an_export(tmp_path: Path) -> None:
    compare(tmp_path, 3)


@pytest.mark.slow
def test_two_hundred_launches_export_the_same_bytes(tmp_path: Path) -> None:
    compare(tmp_path, 200)


if __name__ == "__main__":
    target, store, rank, seed = sys.argv[1:]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=int(rank), world_size=RANKS)
    export(target, int(seed))
    dist.destroy_process_group()
    os._exit(0)  # all is written; rarely, a thread of torch's aborts the interpreter's own way out

"""Host memory that a process needs to load its part of a model.

    torchrun --nproc-per-node 4 tools/bench/load_memory.py             (8 GiB, each process owns a quarter)
    torchrun --nproc-per-node 4 tools/bench/load_memory.py --gib 0.2   (a smoke run)

The model is written in shards of 2 GiB, in bfloat16. Each process then opens it, binds a state graph that renames,
concatenates and stacks, and fills DTensors that are sharded over all processes. Peak memory covers the whole process
(Linux: VmHWM), imports included; a process's own shards are subtracted in the last column.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import torch
from d9d_weights.graph.base import Mapper, Parallel
from d9d_weights.graph.compose import Prefix
from d9d_weights.graph.graph import StateGraph
from d9d_weights.graph.mappers import Rename, Transpose
from d9d_weights.graph.merging import Concatenate, Stack
from d9d_weights.hugging_face.directory import ModelDirectory
from d9d_weights.hugging_face.load import load_tensors
from read_model import GIB, write_model
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard


def mapper(layers: int) -> Mapper:
    """Merged, stacked and transposed tensors in addition to plain ones."""
    layer = Parallel(
        Concatenate(["gate", "up"], "gate_up"),
        Stack(["k", "v"], "kv"),
        Transpose("down"),
        *(Rename(name, f"own.{name}") for name in ("q", "o", "norm", "q_norm", "k_norm")),
    )
    return Parallel(*(Prefix(f"layers.{n}.", f"model.{n}.", layer) for n in range(layers)))


def status(field: str) -> int:
    """Value of a field in /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) * 1024


def main() -> None:
    """Measure, and print a line for each process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=8.0, help="size of the model")
    parser.add_argument("--threads", type=int, default=2, help="that read at a time, in each process")
    parser.add_argument("--directory", type=Path, help="where the model is written; a temporary one by default")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    place: list[str | None] = [None]
    if rank == 0:
        place = [tempfile.mkdtemp(prefix="load-memory-", dir=options.directory)]
        write_model(Path(place[0] or "", "model"), options.gib * GIB, 2 * GIB)
    dist.broadcast_object_list(place)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak, because writing took memory too
    before = status("VmRSS")
    mesh = init_device_mesh("cpu", (ranks,))
    started = time.perf_counter()
    with ModelDirectory.open(f"{place[0]}/model") as directory:
        layers = len({name.split(".")[1] for name in directory.specs})
        graph = StateGraph(mapper(layers), directory.specs)
        targets = {
            name: DTensor.from_local(
                torch.empty((spec.shape[0] // ranks, *spec.shape[1:]), dtype=spec.dtype), mesh, [Shard(0)]
            )
            if spec.shape[0] % ranks == 0
            else torch.empty(spec.shape, dtype=spec.dtype)
            for name, spec in graph.specs.items()
        }
        load_tensors(graph, directory, targets, threads=options.threads)
    seconds = time.perf_counter() - started
    own = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in targets.values())
    peak = status("VmHWM")
    for turn in range(ranks):
        if turn == rank:
            figures = [f"{value / GIB:.2f} GiB" for value in (own, before, peak, peak - own)]
            line = "rank {}: own shards {}, resident before {}, peak {}, peak without own shards {}"
            print(line.format(rank, *figures), f"({seconds:.1f} s)", flush=True)
        dist.barrier()
    if rank == 0:
        shutil.rmtree(place[0] or "")
    dist.destroy_process_group()
    os._exit(0)  # torch's threads may outlive the interpreter


if __name__ == "__main__":
    main()

"""Step time and exposed communication of a data-parallel strategy against plain FSDP2, side by side in one run.

    torchrun --nproc-per-node 4 tools/bench/data_parallel.py --replicate 2 --shard 2

Blocks of steps alternate between the two, so that clocks and neighbours disturb both alike. Exposed communication is
the time in which NCCL kernels run and no other kernel does, from a profile of one step of each.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from d9d_core.registry.registry import Registry
from d9d_engine.job import Job
from here import topology_of
from plain_fsdp2 import plain_step
from random_tokens import Synthetic
from torch import distributed as dist

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_qwen3.plugin")


def job_of(options: argparse.Namespace, directory: str) -> Job:
    """Job of the benchmark."""
    ranks = options.replicate * options.shard
    values = {
        "run": {"dir": directory},
        "steps": 10_000,
        "mesh": {"dp_replicate": options.replicate, "dp_shard": options.shard},
        "parallel": [
            {"name": "hsdp", "compute_dtype": "bfloat16", "reduce_dtype": options.reduce, "defer": "all_reduce"},
        ],
        "batch": {"size": ranks * options.samples * options.microbatches, "microbatch": options.samples},
        "model": {
            "name": "qwen3", "vocab_size": options.vocabulary, "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden, "num_layers": options.layers,
            "num_attention_heads": options.hidden // 128, "num_key_value_heads": options.hidden // 256,
            "max_positions": options.sequence,
        },
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": options.sequence},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        "trackers": [],
        "export": False,
    }  # fmt: skip
    import importlib

    registry = Registry.of(*map(importlib.import_module, MODULES), Synthetic())
    return Job.from_values(values, registry=registry)


def _synchronise() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def timed(run: Callable[[], Any], steps: int) -> float:
    """Seconds per step, the maximum over ranks."""
    _synchronise()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    _synchronise()
    taken = torch.tensor((time.perf_counter() - start) / steps)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def exposed(run: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of one step on this rank in which only NCCL kernels run, and in which any NCCL kernel runs."""
    _synchronise()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        _synchronise()
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        profile.export_chrome_trace(file.name)
        events = json.loads(Path(file.name).read_text())["traceEvents"]
    spans = [(e["ts"], e["ts"] + e["dur"], "nccl" in e["name"]) for e in events if e.get("cat") == "kernel"]
    edges = sorted([(b, 1, c) for b, _, c in spans] + [(e, -1, c) for _, e, c in spans])
    running = {True: 0, False: 0}
    alone = any_ = 0.0
    before = edges[0][0] if edges else 0.0
    for at, change, communicates in edges:
        any_ += (at - before) * (running[True] > 0)
        alone += (at - before) * (running[True] > 0 and running[False] == 0)
        running[communicates] += change
        before = at
    return alone / 1e3, any_ / 1e3


def main() -> None:
    """Measure, and print one JSON line on the main rank."""
    parser = argparse.ArgumentParser()
    for name, value in (
        ("replicate", 1), ("shard", 2), ("samples", 2), ("microbatches", 2), ("layers", 16), ("hidden", 2048),
        ("sequence", 4096), ("vocabulary", 32768), ("steps", 8), ("rounds", 6),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--reduce", default="float32", help="number format in which both sum gradients over ranks")
    options = parser.parse_args()
    from d9d_engine.distributed.mesh import Topology

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    # One directory for all ranks, in which nothing is saved.
    directory = Path(tempfile.gettempdir(), f"d9d-bench-{os.environ['MASTER_PORT']}")
    job = job_of(options, str(directory))
    topology = topology_of(job, device)
    trainer = job.build(lambda _: None, topology)
    numbers = iter(range(10_000))

    def ours() -> Any:
        return trainer.step(next(numbers), trainer.prefetcher.next()).loss

    plain_job = job.model_copy(update={"parallel": [], "mesh": type(job.mesh)()})
    from d9d_core.job_file.resolve import select
    from d9d_engine.compose.assemble import assemble
    from d9d_engine.compose.initialise import initialise
    from d9d_engine.compose.root import compose_root

    alone = Topology(sizes=plain_job.mesh.sizes(), device=device)
    # Choose kernels for bfloat16, the compute dtype of both sides.
    plain_job = plain_job.model_copy(update={"precision": job.precision.model_copy(update={"autocast": "bfloat16"})})
    root = compose_root(plain_job, select(plain_job, job.registry), job.registry, alone, lambda _: None)
    model = assemble(root).model
    blocks = list(model.blocks().values())  # type: ignore[operator]
    step = plain_step(
        model, blocks, topology.mesh("dense", "dp_replicate", "fsdp"), 1e-4, getattr(torch, options.reduce)
    )
    model.to_empty(device=device)
    initialise(model, job.seed, device)

    def theirs() -> Any:
        return step(trainer.prefetcher.next())

    gc.collect()
    gc.freeze()  # like the trainer
    first = [(ours().item(), theirs().item()) for _ in range(3)]
    times: dict[str, list[float]] = {"ours": [], "plain": []}
    for index in range(options.rounds):
        # Alternate the order: the first contender after a pause runs at other GPU clocks.
        for name, run in (("ours", ours), ("plain", theirs))[:: 1 if index % 2 == 0 else -1]:
            times[name].append(timed(run, options.steps))
    on_gpu = device.type == "cuda"
    communication = {}
    if on_gpu:
        exposed(theirs)  # the first profile of a process is slow
        communication = {"ours": exposed(ours), "plain": exposed(theirs)}
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    medians = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    ratios = sorted(a / b for a, b in zip(times["ours"], times["plain"], strict=True))
    if topology.is_main:
        result = {
            "gpus": dist.get_world_size(),
            "device": torch.cuda.get_device_name() if on_gpu else "CPU",
            "torch": torch.__version__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "losses": first,
            "ms": medians,
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "exposed_ms, nccl_ms": communication,
            "peak_gib": peak,
        }
        print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

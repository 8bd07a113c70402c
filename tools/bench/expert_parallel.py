"""Expert parallelism on the GPUs of one machine: parity with ep=1, step times, and the bandwidth of dispatch.

    torchrun --nproc-per-node 4 tools/bench/expert_parallel.py

Trains the same Qwen3-MoE on the same tokens with ep=1 and with ep over all ranks, blocks of steps in turns, and prints
how far losses and gradient norms are apart. Then it takes the dispatcher alone, with as many tokens as a step has and
uniformly random experts, and compares the time of its exchange of tokens, and of the whole dispatch and combine, with a
plain ``all_to_all_single`` that moves the same bytes between the same ranks in equal parts.
"""

from __future__ import annotations

import argparse
import gc
import importlib
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
from d9d_engine.run.trainer import Trainer
from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.all_to_all.pending_rows import Sizes, send_rows
from d9d_moe.router.routing import TopKRouting
from here import synchronise, topology_of
from random_tokens import Synthetic
from torch import Tensor
from torch import distributed as dist

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin", "d9d_qwen3.plugin")


def job_of(options: argparse.Namespace, directory: str, ep: int) -> Job:
    """Job of the benchmark."""
    ranks = dist.get_world_size()
    values = {
        "run": {"dir": directory},
        "steps": 10_000,
        "mesh": {"dp_shard": ranks, "ep": ep},
        "parallel": [
            {"name": "fsdp", "compute_dtype": "bfloat16", "reduce_dtype": "float32"},
            *(["expert_parallel"] if ep > 1 else []),
            *(["compile"] if options.compile else []),
        ],
        "batch": {"size": ranks * options.samples},
        "model": {
            "name": "qwen3_moe", "vocab_size": options.vocabulary, "hidden_size": options.hidden,
            "num_layers": options.layers, "num_attention_heads": options.hidden // 128,
            "num_key_value_heads": options.hidden // 512, "head_dim": 128, "num_experts": options.experts,
            "experts_per_token": options.top, "moe_intermediate_size": options.inside,
            "max_positions": options.sequence,
        },
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": options.sequence},
        "optimizer": {"name": "adamw", "lr": 1e-4, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        "trackers": [],
        "export": False,
    }  # fmt: skip
    registry = Registry.of(*map(importlib.import_module, MODULES), Synthetic())
    return Job.from_values(values, registry=registry)


def trainer_of(job: Job, device: torch.device) -> Trainer:
    """Trainer of a job on this rank's device."""
    return job.build(lambda _: None, topology_of(job, device))


def timed(run: Callable[[], Any], times: int) -> float:
    """Seconds per call, the maximum over ranks."""
    synchronise()
    start = time.perf_counter()
    for _ in range(times):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = torch.tensor((time.perf_counter() - start) / times)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def in_turns(runs: dict[str, Callable[[], Any]], times: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each function in each round, alternating between them."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(rounds):
        # Alternate the order: the first contender after a pause runs at other GPU clocks.
        for name, run in list(runs.items())[:: 1 if index % 2 == 0 else -1]:
            found[name].append(timed(run, times))
    return found


def steps(options: argparse.Namespace, directory: str, device: torch.device) -> dict[str, Any]:
    """Compare both layouts: results, and time of a step."""
    trainers = {ep: trainer_of(job_of(options, directory, ep), device) for ep in (1, dist.get_world_size())}
    gc.collect()
    gc.freeze()  # like the trainer
    numbers = {ep: iter(range(10_000)) for ep in trainers}

    def step(ep: int) -> Any:
        trainer = trainers[ep]
        return trainer.step(next(numbers[ep]), trainer.prefetcher.next())

    results = {ep: [step(ep) for _ in range(4)] for ep in trainers}
    values = {ep: [(r.loss.item(), r.grad_norm.item()) for r in found] for ep, found in results.items()}
    apart = [
        max(abs(a - b) / b for a, b in zip(mine, other, strict=True))
        for mine, other in zip(*values.values(), strict=True)
    ]
    found = in_turns({f"ep={ep}": lambda ep=ep: step(ep) for ep in trainers}, options.steps, options.rounds)  # type: ignore[misc]
    return {
        "loss, gradient norm": values,
        "worst relative difference by step": apart,
        "ms": {name: round(statistics.median(times) * 1e3, 1) for name, times in found.items()},
        "parameters": sum(p.numel() for p in trainers[1].stage.parameters()),
    }


def dispatching(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Compare the dispatcher with plain all-to-alls of the same bytes."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(rank)
    count = options.samples * options.sequence
    tokens = torch.randn(count, options.hidden, generator=generator).to(device, dtype)
    indices = torch.rand(count, options.experts, generator=generator).topk(options.top).indices.to(device)
    weights = torch.full((count, options.top), 1 / options.top, device=device)
    routing = TopKRouting.of(indices, weights, options.experts)
    dispatcher = AllToAllDispatcher(group, options.experts)

    def there_and_back() -> Tensor:
        sent = dispatcher.dispatch(tokens, routing).wait()
        return dispatcher.combine(sent.tokens, sent.handle).wait()

    with torch.no_grad():
        sizes: Sizes = dispatcher.dispatch(tokens, routing).wait().handle.sizes
        rows = tokens.new_empty(sum(sizes.sent), options.hidden).normal_()
        total = torch.tensor([sum(sizes.sent)])
        dist.all_reduce(total)
        each = int(total.item()) // ranks // ranks
        even_in, even_out = (tokens.new_empty(each * ranks, options.hidden).normal_() for _ in range(2))

        def plain() -> Any:
            return dist.all_to_all_single(even_out, even_in, group=group)

        def both_ways() -> None:
            plain()
            plain()

        for run in (plain, there_and_back):
            for _ in range(5):
                run()
        runs = {
            "plain": plain,
            "exchange": lambda: send_rows(rows, sizes, group).wait(),
            "plain both ways": both_ways,
            "dispatch and combine": there_and_back,
        }
        found = in_turns(runs, 20, options.rounds)
    ms = {name: statistics.median(times) * 1e3 for name, times in found.items()}
    gigabytes = each * (ranks - 1) * options.hidden * tokens.itemsize / 1e9  # bytes that leave a rank
    return {
        "rows sent by each rank": each * ranks,
        "rows if each expert got its own copy": count * options.top,
        "ms": {name: round(value, 3) for name, value in ms.items()},
        "GB/s out of a rank": {
            name: round(gigabytes / value * 1e3, 1)
            for name, value in ms.items()
            if "both" not in name and "dispatch" not in name
        },
        "bandwidth ratio": round(ms["plain"] / ms["exchange"], 3),
        "whole dispatch and combine, ratio": round(ms["plain both ways"] / ms["dispatch and combine"], 3),
    }


def main() -> None:
    """Measure, and print one JSON line on the main rank."""
    parser = argparse.ArgumentParser()
    for name, value in (
        ("samples", 2), ("sequence", 4096), ("layers", 4), ("hidden", 2048), ("experts", 128), ("top", 8),
        ("inside", 768), ("vocabulary", 32_768), ("steps", 5), ("rounds", 5),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    # One directory for all ranks, in which nothing is saved.
    directory = str(Path(tempfile.gettempdir(), f"d9d-bench-{os.environ['MASTER_PORT']}"))
    result: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "dispatch": dispatching(options, device),
        "steps": steps(options, directory, device),
    }
    if dist.get_rank() == 0:
        print(json.dumps(result, indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Pipeline schedules on the GPUs of one machine, compared with torch.distributed.pipelining and the simulator.

    torchrun --nproc-per-node 4 tools/bench/pipeline.py

For each schedule, the same Qwen3 is cut into the same stages, with the same weights, kernels and microbatches, and run
forward and backward by both, blocks of steps in turns; gradients are compared once. Then each stage is measured alone
(forward, whole backward, gradients of inputs, gradients of weights), the simulator predicts the step from these costs,
and the bubble that it predicts is compared with the one measured: 1 - (time that ranks compute) / (ranks x step).
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import itertools
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from d9d_core.plugin import ScheduleSpec
from d9d_core.registry.registry import Registry
from d9d_core.traits import DefersWeights, HasOps, modules_with
from d9d_core.types import Pack
from d9d_engine.distributed.devices import load_kernels_eagerly, share_hardware_queues
from d9d_engine.job import Job
from d9d_engine.run.trainer import Trainer
from d9d_engine.step.executor import Executor
from here import synchronise, topology_of
from random_tokens import Synthetic
from stage_costs import Run, predicted, stage_costs, timed, transfer_ms
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.pipelining import PipelineStage, schedules
from torch.nn import functional
from traces import covered, merged, recorded

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_pipeline.plugin", "d9d_qwen3.plugin")
#: Name of d9d's schedule -> torch's class.
PAIRS = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "looped_bfs": "ScheduleLoopedBFS",
    "interleaved_1f1b": "ScheduleInterleaved1F1B",
    "zb1p": "ScheduleInterleavedZeroBubble",
    "zero_bubble_v": "ScheduleZBVZeroBubble",
    "dual_pipe_v": "ScheduleDualPipeV",
}


def job_of(options: argparse.Namespace, directory: str, schedule: str) -> Job:
    """Job of the benchmark."""
    values = {
        "run": {"dir": directory},
        "steps": 10_000,
        "device": options.device,
        "mesh": {"pp": dist.get_world_size()},
        "pipeline": {"name": schedule},
        "precision": {"parameters": "float32" if options.device == "cpu" else "bfloat16"},
        "batch": {"size": options.microbatches, "microbatch": 1},
        "model": {
            "name": "qwen3", "vocab_size": options.vocabulary, "hidden_size": options.hidden,
            "intermediate_size": 3 * options.hidden, "num_layers": options.layers,
            "num_attention_heads": options.hidden // options.head,
            "num_key_value_heads": max(1, options.hidden // options.head // 2), "head_dim": options.head,
            "max_positions": options.sequence,
        },
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": options.sequence},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "trackers": [],
        "export": False,
    }  # fmt: skip
    registry = Registry.of(*map(importlib.import_module, MODULES), Synthetic())
    return Job.from_values(values, registry=registry)


def trainer_of(job: Job, device: torch.device) -> Trainer:
    """Trainer of a job on this rank's device."""
    return job.build(lambda _: None, topology_of(job, device))


class TorchStage(nn.Module):
    """Stage in the form that torch expects: one input tensor, one output tensor; :meth:`loss` computes the loss."""

    def __init__(self, stage: Any, scale: float) -> None:
        super().__init__()
        self.stage = stage
        self.stage.has_heads = False  # torch calls the loss separately
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens or hidden states to hidden states."""
        hidden: Tensor = self.stage(**{"tokens" if self.stage.stage.is_first else "hidden": x})["hidden"]
        return hidden

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Contribution of a microbatch to the mean loss."""
        loss: Tensor = self.stage.heads(hidden, {}, targets=targets)["token_loss"].sum() * self.scale
        return loss


def plain_head(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Loss of each token by torch's own functions: its split backward does not support custom ones (2.11)."""
    logits = functional.linear(hidden, weight)
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return loss.view_as(targets)


def torch_runner(executor: Executor, name: str, pack: Pack, scale: float) -> tuple[Run, list[nn.Module]]:
    """Function that runs a step of torch's schedule over copies of d9d's stages."""
    stages = {index: copy.deepcopy(stage) for index, stage in executor.stages.items()}
    for stage in stages.values():
        for module in stage.modules():
            if isinstance(module, DefersWeights):
                module.defer_to(None)
    wrapped = [TorchStage(stage, scale) for stage in stages.values()]
    count, device = len(executor.pipeline.hosts), executor.topology.device
    made = [PipelineStage(w, index, count, device) for w, index in zip(wrapped, stages, strict=True)]
    kind = getattr(schedules, PAIRS[name])
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(made[0] if single else made, len(pack), loss_fn=wrapped[-1].loss, scale_grads=False)
    tokens = torch.cat([microbatch["tokens"] for microbatch in pack])
    targets = torch.cat([microbatch["targets"] for microbatch in pack])
    last = count - 1 in stages

    def run() -> None:
        given = (tokens,) if 0 in stages else ()
        losses: list[Tensor] = []
        schedule.step(*given, return_outputs=False, **({"target": targets, "losses": losses} if last else {}))

    return run, list(stages.values())


def traced(options: argparse.Namespace, schedule: str, which: str) -> Path | None:
    """Path of this rank's Chrome trace, or ``None``."""
    return Path(options.traces, f"{schedule}-{which}-{dist.get_rank()}.json") if options.traces else None


def profiled(run: Run, device: torch.device, trace: Path | None) -> list[dict[str, float]]:
    """Milliseconds of one profiled step on each rank: by kind of kernel, and without any compute kernel."""

    def step() -> None:
        synchronise()
        run()
        synchronise()

    found = recorded(step, device, trace)
    compute = [kernel for kernel in found if kernel.kind == "compute"]
    exchanges = [kernel for kernel in found if kernel.kind == "exchange"]
    busy = merged(compute)
    row = {
        "compute": sum(kernel.end - kernel.begin for kernel in compute),
        "transfers": sum(kernel.end - kernel.begin for kernel in exchanges),
        "transfers beside compute": covered(exchanges, compute),
        "idle inside": sum(later[0] - earlier[1] for earlier, later in itertools.pairwise(busy)),
        "from first to last": busy[-1][1] - busy[0][0] if busy else 0.0,
    }
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, {what: round(value / 1e3, 1) for what, value in row.items()})
    return rows


def columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    """Convert one dictionary per rank to one dictionary of lists."""
    return {what: [row[what] for row in rows] for what in rows[0]}


def measure(options: argparse.Namespace, name: str, device: torch.device, directory: str) -> dict[str, Any]:
    """Measure one schedule."""
    trainer = trainer_of(job_of(options, directory, name), device)
    executor = trainer.step.executor
    for module in modules_with(trainer.stage, HasOps).values():
        for slot in module.op_slots().values():
            if slot.op == "linear_cross_entropy":
                slot.bind("plain", plain_head)
    with trainer.prefetcher as feed:
        pack = feed.next()
        scale = trainer.step.loss_scale.begin(pack)

        def ours() -> None:
            executor.run(0, pack, scale)

        theirs, copies = torch_runner(executor, name, pack, float(scale["cross_entropy"]))
        runs = {"ours": ours, "torch": theirs}
        for run in runs.values():
            run()
        off = apart(list(executor.stages.values()), copies)
        found: dict[str, list[float]] = {which: [] for which in runs}
        for index in range(options.rounds):
            # Alternate the order: the first contender after a pause runs at other GPU clocks.
            for which, run in list(runs.items())[:: 1 if index % 2 == 0 else -1]:
                found[which].append(timed(run, options.steps))
        synchronise()
        start = time.perf_counter()
        ours()
        host = (time.perf_counter() - start) * 1e3
        medians = {which: statistics.median(times) for which, times in found.items()}
        ratios = [a / b for a, b in zip(found["ours"], found["torch"], strict=True)]
        profiles = {which: profiled(run, device, traced(options, name, which)) for which, run in runs.items()}
        for stage in (*executor.stages.values(), *copies):
            stage.zero_grad()
        del copies, theirs, runs
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, stage_costs(executor, pack, scale, options.times))
        costs = {index: row for rows in gathered for index, row in rows.items()}
        simulation = predicted(executor, costs, transfer_ms(executor, pack), len(pack))
    busy = sum(simulation.busy) / simulation.ranks
    return {
        "ours ms": round(medians["ours"], 1),
        "torch ms": round(medians["torch"], 1),
        "ours, host ms": round(host, 1),
        "ours / torch": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "gradients 1-cos": off,
        "bubble, measured": round(1 - busy / medians["ours"], 3),
        "bubble, torch": round(1 - busy / medians["torch"], 3),
        "bubble, predicted": round(simulation.bubble, 3),
        "predicted ms": round(simulation.makespan, 1),
        "profile, by rank": {which: columns(rows) for which, rows in profiles.items()},
        "stages [F, B, I, W] ms": {index: [round(v, 2) for v in costs[index]] for index in sorted(costs)},
    }


def apart(stages: list[nn.Module], copies: list[nn.Module]) -> float:
    """Largest ``1 - cos`` between the gradients of both, over all ranks."""
    worst = torch.zeros(())
    for stage, other in zip(stages, copies, strict=True):
        for mine, theirs in zip(stage.parameters(), other.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            pair = (mine.grad.flatten().double(), theirs.grad.flatten().double())
            worst = torch.maximum(worst, 1 - torch.cosine_similarity(*pair, dim=0).cpu())
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(f"{worst.item():.1e}")


def main() -> None:
    """Print one JSON object per schedule."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--schedules", default="1f1b,interleaved_1f1b,zb1p,zero_bubble_v,dual_pipe_v")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--times", type=int, default=12)
    parser.add_argument("--traces", help="existing folder for Chrome traces of all ranks")
    options = parser.parse_args()
    cuda = options.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        load_kernels_eagerly("cuda")
        registry = Registry.of(*map(importlib.import_module, MODULES))
        specs = [registry.find("schedule", name).spec for name in options.schedules.split(",")]
        # All schedules run in one process.
        if all(isinstance(spec, ScheduleSpec) and spec.ordered_transfers for spec in specs):
            share_hardware_queues("cuda")
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    recorded(synchronise, device)  # the first profile of a process is slow
    with tempfile.TemporaryDirectory() as own:
        places = [own]
        dist.broadcast_object_list(places, 0)  # one for all ranks
        directory = places[0]
        for name in options.schedules.split(","):
            found = measure(options, name, device, directory)
            gc.collect()
            if cuda:
                torch.cuda.empty_cache()
            if dist.get_rank() == 0:
                print(name, json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

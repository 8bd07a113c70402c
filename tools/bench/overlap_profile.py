"""Step time of overlapped pairs of a forward and a backward, and the share of the all-to-all that they hide.

    torchrun --nproc-per-node 2 tools/bench/overlap_profile.py --table overlap.txt

Each rank has both stages of a Qwen3-MoE, experts spread over all ranks. A microbatch takes two pairs, as in the middle
of ``dual_pipe_v``: the forward of the first stage with the backward of the second for the microbatch before, then the
forward of the second with the backward of the first. Three ways to run the same, blocks in turns:

- ``one stream``: one after the other, all on the current stream;
- ``streams``: one after the other, but each stage on its own stream;
- ``pairs``: :class:`d9d_pipeline.overlap.pair_runner.PairRunner` on these streams.

A profile of each then shows for how much of the time of all-to-all kernels a compute kernel of the other side ran. The
main thread launches the kernels of the forward, autograd's thread the kernels of the backward.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from d9d_core.model import Stage
from d9d_core.registry.registry import Registry
from d9d_engine.compose.initialise import initialise
from d9d_engine.compose.kernels import bind_kernels
from d9d_engine.distributed.mesh import Topology
from d9d_engine.job import Job
from d9d_moe.expert_parallel.config import ExpertParallelConfig
from d9d_moe.expert_parallel.strategy import ExpertParallel
from d9d_parallel.activation_checkpointing.config import ActivationCheckpointingConfig
from d9d_parallel.activation_checkpointing.strategy import ActivationCheckpointing
from d9d_parallel.compile.config import CompileConfig
from d9d_parallel.compile.strategy import Compile
from d9d_parallel.data_parallel.config import FsdpConfig
from d9d_parallel.data_parallel.strategy import Fsdp
from d9d_pipeline.overlap.pair_runner import PairRunner
from d9d_pipeline.overlap.streams import StageStreams
from d9d_qwen3.model import Qwen3
from here import synchronise, topology_of
from random_tokens import Synthetic
from torch import Tensor, nn
from torch import distributed as dist
from traces import Kernel, covered, recorded

MODULES = ("d9d_nn.plugin", "d9d_optim.plugin", "d9d_parallel.plugin", "d9d_moe.plugin", "d9d_qwen3.plugin")
FIRST, SECOND = 0, 1
Part = Callable[[], None]


def job_of(options: argparse.Namespace, directory: str) -> Job:
    """Job with the given mesh and model."""
    ranks = dist.get_world_size()
    values = {
        "run": {"dir": directory},
        "steps": 1,
        "mesh": {"dp_shard": ranks, "ep": ranks},
        "parallel": ["fsdp", "expert_parallel"],
        "batch": {"size": ranks * options.samples},
        "model": {
            "name": "qwen3_moe", "vocab_size": options.vocabulary, "hidden_size": options.hidden,
            "num_layers": 2 * options.layers, "num_attention_heads": options.hidden // options.head,
            "num_key_value_heads": max(1, options.hidden // options.head // 4), "head_dim": options.head,
            "num_experts": options.experts, "experts_per_token": options.top,
            "moe_intermediate_size": options.inside, "max_positions": options.sequence,
        },
        "task": "causal_lm",
        "data": {"name": "random_tokens", "vocab_size": options.vocabulary, "sequence_length": options.sequence},
        "optimizer": {"name": "adamw", "lr": 1e-4},
        "trackers": [],
        "export": False,
    }  # fmt: skip
    registry = Registry.of(*map(importlib.import_module, MODULES), Synthetic())
    return Job.from_values(values, registry=registry)


def stages_of(options: argparse.Namespace, job: Job, topology: Topology) -> dict[int, nn.Module]:
    """Both stages in their training dtypes: bfloat16 for computation, float32 for stored parameters."""
    device = topology.device
    stages: dict[int, nn.Module] = {}
    split = Stage(count=2, layers=(options.layers, options.layers))
    for index in (FIRST, SECOND):
        with torch.device("meta"):
            stage = Qwen3(job.model, Stage(index, split.count, split.layers))  # type: ignore[arg-type]
        ExpertParallel(ExpertParallelConfig()).apply(stage, topology)
        if options.checkpoint:
            ActivationCheckpointing(ActivationCheckpointingConfig()).apply(stage, topology)
        if options.compile:
            Compile(CompileConfig()).apply(stage, topology)
        dtypes: Any = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"} if device.type == "cuda" else {}
        Fsdp(FsdpConfig(reshard_after_forward=False, **dtypes)).apply(stage, topology)
        bind_kernels(
            stage.named_modules(), job.registry, {}, device.type, dtypes.get("compute_dtype", "float32"), lambda _: ()
        )
        stage.to_empty(device=device)
        initialise(stage, 0, device)
        stages[index] = stage.train()
    return stages


class Run:
    """Run of microbatches through both stages, with or without overlap.

    Args:
        stages: both stages.
        microbatch: ``tokens`` and ``targets`` [B, S].
        streams: streams of the stages; ``None`` runs everything on the current stream.
        pair: function that runs a forward and a backward.
    """

    def __init__(
        self,
        stages: dict[int, nn.Module],
        microbatch: dict[str, Tensor],
        streams: StageStreams | None,
        pair: Callable[[Part, Part], None],
    ) -> None:
        self._stages = stages
        self._microbatch = microbatch
        self._streams = streams
        self._pair = pair
        self._sent: list[tuple[Tensor, Any]] = []  # outputs of the first stage with their graphs, and their marks
        self._received: list[tuple[Tensor, Tensor]] = []  # inputs of the second stage, and its loss
        self._returned: list[tuple[Tensor, Any]] = []  # gradients of the second stage's inputs, and their marks
        self.loss = torch.zeros(())

    def begin(self) -> None:
        """Run the forward of one microbatch, so that every later forward has a backward to overlap with."""
        if self._streams is not None:
            self._streams.fork()
        self._forward_first()
        self._forward_second()

    def microbatch(self) -> None:
        """Run the two overlapped pairs of one microbatch."""
        self._pair(self._forward_first, self._backward_second)
        self._pair(self._forward_second, self._backward_first)

    def end(self) -> None:
        """Run the remaining backward."""
        self._backward_second()
        self._backward_first()
        if self._streams is not None:
            self._streams.join()

    def _on(self, stage: int) -> AbstractContextManager[None]:
        return nullcontext() if self._streams is None else self._streams.on(stage)

    def _mark(self, stage: int) -> Any:
        return None if self._streams is None else self._streams.mark(stage)

    def _hand(self, tensor: Tensor, source: int, target: int, made: Any) -> None:
        if self._streams is not None:
            self._streams.handoff([tensor], source, target, made)

    def _forward_first(self) -> None:
        with self._on(FIRST):
            hidden = self._stages[FIRST](tokens=self._microbatch["tokens"])["hidden"]
        self._sent.append((hidden, self._mark(FIRST)))

    def _forward_second(self) -> None:
        sent, made = self._sent[-1]
        hidden = sent.detach().requires_grad_()
        self._hand(hidden, FIRST, SECOND, made)
        with self._on(SECOND):
            losses = self._stages[SECOND](hidden=hidden, targets=self._microbatch["targets"])["token_loss"]
            self.loss = losses.mean()
            self._received.append((hidden, self.loss))

    def _backward_second(self) -> None:
        hidden, loss = self._received.pop(0)
        with self._on(SECOND):
            torch.autograd.backward(loss)
        assert hidden.grad is not None
        self._returned.append((hidden.grad, self._mark(SECOND)))

    def _backward_first(self) -> None:
        gradient, made = self._returned.pop(0)
        self._hand(gradient, SECOND, FIRST, made)
        with self._on(FIRST):
            torch.autograd.backward(self._sent.pop(0)[0], gradient)


def one_after_the_other(forward: Part, backward: Part) -> None:
    """Run the forward and then the backward of a pair, without overlap."""
    forward()
    backward()


# --- time -------------------------------------------------------------------------------------------------------------


def block(run: Run, times: int) -> float:
    """Seconds per microbatch in the steady state, the maximum over ranks."""
    run.begin()
    synchronise()
    start = time.perf_counter()
    for _ in range(times):
        run.microbatch()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = torch.tensor((time.perf_counter() - start) / times)
    run.end()
    synchronise()
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def results(run: Run, stages: Iterable[nn.Module]) -> list[float]:
    """Loss, and norm of this rank's part of the gradients, of two microbatches."""
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    for parameter in parameters:
        parameter.grad = None
    block(run, 1)
    locals_ = [p.grad.to_local() for p in parameters if p.grad is not None]  # type: ignore[attr-defined]
    norm = torch.stack([grad.float().norm() for grad in locals_]).norm()
    return [run.loss.item(), norm.item()]


# --- profile ----------------------------------------------------------------------------------------------------------


def summary(found: Sequence[Kernel], microbatches: int) -> dict[str, Any]:
    """Milliseconds per microbatch, and fractions of the all-to-all time."""

    def of(kind: str, *sides: str) -> list[Kernel]:
        return [kernel for kernel in found if kernel.kind == kind and (not sides or kernel.side in sides)]

    def busy(some: Sequence[Kernel]) -> float:
        return round(sum(kernel.end - kernel.begin for kernel in some) / 1e3 / microbatches, 3)

    exchanges = of("exchange")
    time_of_exchanges = sum(kernel.end - kernel.begin for kernel in exchanges)
    other = covered(of("exchange", "forward"), of("compute", "backward"))
    other += covered(of("exchange", "backward"), of("compute", "forward"))
    compute = of("compute")
    both = covered(of("compute", "forward"), of("compute", "backward"))
    window = max((k.end for k in found), default=0.0) - min((k.begin for k in found), default=0.0)
    return {
        "all-to-all ms": busy(exchanges),
        "other communication ms": busy(of("other communication")),
        "compute ms": busy(compute),
        "both sides compute ms": round(both / 1e3 / microbatches, 3),
        "window ms": round(window / 1e3 / microbatches, 3),
        "all-to-all beside compute of the other side": _share(other, time_of_exchanges),
        "all-to-all beside any compute": _share(covered(exchanges, compute), time_of_exchanges),
        "kernels of unknown side": sum(kernel.side == "unknown" for kernel in found),
        "compute streams": len({kernel.stream for kernel in compute}),
    }


def _share(part: float, whole: float) -> float | None:
    return round(part / whole, 3) if whole else None


def profiled(run: Run, microbatches: int, trace: Path | None) -> dict[str, Any]:
    """Profile summary of some microbatches in the steady state."""
    run.begin()
    synchronise()

    def work() -> None:
        for _ in range(microbatches):
            run.microbatch()
        synchronise()

    found = recorded(work, run.loss.device, trace)
    run.end()
    synchronise()
    return summary(found, microbatches)


def table(profiles: dict[str, dict[str, Any]], ms: dict[str, float]) -> str:
    """Table with a row for each number and a column for each variant."""
    rows = [["", *profiles], ["ms of a microbatch", *(f"{ms[name]:.2f}" for name in profiles)]]
    numbers = next(iter(profiles.values()))
    rows += [[what, *("-" if p[what] is None else str(p[what]) for p in profiles.values())] for what in numbers]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))])
             for row in rows]  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def measure(options: argparse.Namespace, device: torch.device) -> tuple[dict[str, Any], str]:
    """Run all measurements on this rank."""
    # One directory for all ranks, in which nothing is saved.
    directory = str(Path(tempfile.gettempdir(), f"d9d-bench-{os.environ['MASTER_PORT']}"))
    job = job_of(options, directory)
    topology = topology_of(job, device)
    stages = stages_of(options, job, topology)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (options.samples, options.sequence)
    names = ("tokens", "targets")
    microbatch = {n: torch.randint(options.vocabulary, shape, generator=generator).to(device) for n in names}
    runner, streams = PairRunner(stages, device), StageStreams(device, stages)
    runs = {
        "one stream": Run(stages, microbatch, None, one_after_the_other),
        "streams": Run(stages, microbatch, streams, one_after_the_other),
        "pairs": Run(stages, microbatch, streams, runner.run),
    }
    values = {name: results(run, stages.values()) for name, run in runs.items()}  # warms up, too
    times: dict[str, list[float]] = {name: [] for name in runs}
    for index in range(options.rounds):
        # Alternate the order: the first contender after a pause runs at other GPU clocks.
        for name, run in list(runs.items())[:: 1 if index % 2 == 0 else -1]:
            times[name].append(block(run, options.microbatches))
    profiles = {}
    for name, run in runs.items():
        profiled(run, 1, None)  # the first profile of a process is slow
        trace = None
        if options.traces and topology.is_main:
            trace = Path(options.traces, f"{name.replace(' ', '_')}.json")
        profiles[name] = profiled(run, options.profiled, trace)
    ms = {name: statistics.median(found) * 1e3 for name, found in times.items()}
    ratios = {
        name: sorted(round(mine / theirs, 3) for mine, theirs in zip(times["pairs"], times[name], strict=True))
        for name in ("one stream", "streams")
    }
    result = {
        "ranks": dist.get_world_size(),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "parameters here": sum(p.to_local().numel() for s in stages.values() for p in s.parameters()),  # type: ignore[attr-defined]
        "blocks": runner.blocks,
        "loss, gradient norm": values,
        "ms": {name: round(value, 3) for name, value in ms.items()},
        "pairs over": {name: round(statistics.median(found), 3) for name, found in ratios.items()},
        "rounds": ratios,
        "profile": profiles,
    }
    if device.type == "cuda":
        result["peak GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    runner.close()
    return result, table(profiles, ms)


def main() -> None:
    """Measure; print one line of JSON and the table on the main rank."""
    parser = argparse.ArgumentParser()
    for name, value in (
        ("samples", 2), ("sequence", 4096), ("layers", 4), ("hidden", 2048), ("head", 128), ("experts", 128),
        ("top", 8), ("inside", 768), ("vocabulary", 32_768), ("microbatches", 6), ("rounds", 6), ("profiled", 3),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", action="store_true", help="compute all blocks again in the backward")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--table", help="file to write the table to")
    parser.add_argument("--traces", help="existing folder for the main rank's Chrome traces")
    options = parser.parse_args()
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl")
    result, text = measure(options, device)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
        print(text, flush=True)
        if options.table:
            Path(options.table).write_text(text + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

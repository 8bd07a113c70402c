"""Measured cost of each pipeline stage and each transfer alone, and the step that the simulator predicts from them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from d9d_core.types import Pack
from d9d_engine.step.executor import Executor
from d9d_pipeline.runtime.split_backward import SplitBackward
from d9d_pipeline.simulator.costs import Costs
from d9d_pipeline.simulator.run import simulate
from here import synchronise
from torch import Tensor
from torch import distributed as dist

Run = Callable[[], Any]


def timed(run: Run, times: int) -> float:
    """Milliseconds per call, the maximum over ranks."""
    synchronise()
    start = time.perf_counter()
    for _ in range(times):
        run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    taken = torch.tensor((time.perf_counter() - start) / times * 1e3)
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return taken.item()


def stage_costs(executor: Executor, pack: Pack, scale: Mapping[str, Tensor], times: int) -> dict[int, list[float]]:
    """Local stage -> median milliseconds of its forward, whole backward, and both halves of a split backward."""
    found: dict[int, list[float]] = {}
    count, device = len(executor.pipeline.hosts), executor.topology.device
    plug = torch.zeros(8192, 8192, dtype=torch.bfloat16, device=device) if device.type == "cuda" else None
    for index, stage in executor.stages.items():
        split, microbatch = SplitBackward(stage), pack[0]
        rows = []
        for step in range(times + 2):
            leaf: list[Tensor] = []
            given: dict[str, Tensor] = {"tokens": microbatch["tokens"]}
            if index:
                spec = executor.announced(index - 1, microbatch)["hidden"]
                leaf = [torch.randn(spec.shape, dtype=spec.dtype, device=device, requires_grad=True)]
                given = {"hidden": leaf[0]}

            for whole in (True, False):
                clock = Clock(device, plug)
                outputs = stage(**given, targets=microbatch["targets"])
                last = index == count - 1
                root = outputs["token_loss"].sum() * scale["cross_entropy"] if last else outputs["hidden"]
                clock.tick()
                gradient = None if last else torch.ones_like(root)
                if whole:
                    split.backward([root], [gradient])
                    clock.tick()
                else:
                    weights = split.inputs([root], [gradient], leaf)
                    clock.tick()
                    weights.run()
                    clock.tick()
                rows.append((whole, clock))
            if step < 2:
                rows.clear()
        wholes, halves = ([clock.times() for whole, clock in rows if whole is kind] for kind in (True, False))
        columns = [[row[0] for row in wholes + halves], [row[1] for row in wholes]]
        columns += [[row[i] for row in halves] for i in (1, 2)]
        found[index] = [statistics.median(column) for column in columns]
        stage.zero_grad()
    return found


class Clock:
    """Timer of intervals between ticks, on the device's clock.

    Args:
        device: device to time.
        plug: work that keeps the device busy while the host launches the measured calls.
    """

    def __init__(self, device: torch.device, plug: Tensor | None) -> None:
        self._cuda = device.type == "cuda"
        if plug is not None:
            for _ in range(12):
                plug @ plug
        self._ticks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        """Record the current time in stream order."""
        if self._cuda:
            self._ticks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._ticks[-1].record()
        else:
            self._ticks.append(time.perf_counter())

    def times(self) -> list[float]:
        """Milliseconds between the ticks."""
        pairs = list(zip(self._ticks, self._ticks[1:], strict=False))
        if not self._cuda:
            return [(b - a) * 1e3 for a, b in pairs]
        torch.cuda.synchronize()
        return [a.elapsed_time(b) for a, b in pairs]


def transfer_ms(executor: Executor, pack: Pack, times: int = 20) -> float:
    """Milliseconds to send one boundary from the first rank to the second."""
    spec = executor.announced(0, pack[0])["hidden"]
    tensor = torch.zeros(spec.shape, dtype=spec.dtype, device=executor.topology.device)

    def run() -> None:
        if dist.get_rank() == 0:
            dist.send(tensor, dst=1)
        elif dist.get_rank() == 1:
            dist.recv(tensor, src=0)

    timed(run, 3)
    return timed(run, times)


def predicted(executor: Executor, costs: Mapping[int, list[float]], transfer: float, microbatches: int) -> Any:
    """Simulated step from the measured costs."""
    pipeline = executor.pipeline
    forward, whole, inputs, weights = (list(column) for column in zip(*(costs[i] for i in sorted(costs)), strict=True))
    split = any(kind.__name__ == "InputBackward" for kind in pipeline.kinds)
    backward = [i + w for i, w in zip(inputs, weights, strict=True)] if split else whole
    late = weights if split else [0.0] * len(whole)
    programs = [pipeline.program(rank, microbatches) for rank in range(pipeline.ranks)]
    return simulate(programs, Costs(forward=forward, backward=backward, weight=late, transfer=transfer))

"""Metrics on GPUs: merged on a stream of their own, in parallel with the steps, without waiting."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from d9d_core.events import StepResult
from d9d_engine.run.logbook import Logbook
from d9d_engine.step.metrics import Statistics
from d9d_testing.world import World
from torch import Tensor
from torch import distributed as dist

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # of torch's debug mode, which is a prototype
]
SAMPLES, STEPS, EVERY = 1 << 16, 60, 3


class InPlace:
    """Counts into its tensors, loads into them and zeroes them: what would be torn if streams did not wait."""

    reductions: Mapping[str, Any] = {"counts": "sum", "largest": "max"}

    def __init__(self) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.counts = torch.zeros(SAMPLES, dtype=torch.float64, device=device)
        self.largest = torch.full((), -torch.inf, dtype=torch.float64, device=device)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        self.counts += observations["x"]
        self.largest.copy_(torch.maximum(self.largest, observations["x"].max()))

    def state(self) -> dict[str, Tensor]:
        return {"counts": self.counts, "largest": self.largest}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.counts.copy_(state["counts"])
        self.largest.copy_(state["largest"])

    def compute(self) -> Mapping[str, Tensor]:
        return {
            "sum": self.counts.sum(),
            "spread": self.counts.amax() - self.counts.amin(),
            "largest": self.largest + 0,
        }

    def reset(self) -> None:
        self.counts.zero_()
        self.largest.fill_(-torch.inf)


def logged(beside: bool) -> list[dict[str, float]]:
    """Log entries of some periods, with steps that take longer than a reduction."""
    rank = dist.get_rank()
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    twins = {"mine": InPlace()} if beside else None
    statistics = Statistics({"mine": InPlace()}, False, dist.group.WORLD, device, twins)
    lines: list[dict[str, float]] = []
    logbook = Logbook(lambda step, values: lines.append({"step": step, **values}), lambda *_: None, "error")
    one = torch.ones((), device=device)
    result = StepResult(one, {"loss": one}, one, one > 0, one, one < 0)
    for step in range(1, STEPS + 1):
        if step == 2 * EVERY + 1:  # lazy initialisation may wait
            torch.cuda.set_sync_debug_mode("error")
        statistics.begin()
        statistics.update({"x": torch.full((SAMPLES,), float(step + rank), dtype=torch.float64, device=device)})
        total = torch.full((SAMPLES,), 1.0, device=device)
        dist.all_reduce(total)  # another collective of the same group, of the step itself
        torch.cuda._sleep(2_000_000)
        if step % EVERY:
            logbook.record(step, result, None)
        else:
            logbook.record(step, result, {}, statistics.compute(), 1.0, statistics.beside)
            statistics.reset()
        torch.randn(SAMPLES, device=device)  # takes memory that a careless stream had given back
    torch.cuda.set_sync_debug_mode("default")
    logbook.drain()
    return [{name: line[name] for name in ("step", "sum", "spread", "largest")} for line in lines]


@pytest.mark.gpus(2)
def test_values_beside_the_steps_are_those_of_the_stream_of_the_steps() -> None:
    world = World(2, timeout=180.0, backend="cpu:gloo,cuda:nccl")
    beside = world.run(logged, True)
    assert beside[0] == beside[1]
    for line, end in zip(beside[0], range(EVERY, STEPS + 1, EVERY), strict=True):
        steps = range(end - EVERY + 1, end + 1)
        expected = sum(2 * step + 1 for step in steps) * SAMPLES
        assert line == {"step": end, "sum": expected, "spread": 0, "largest": end + 1}

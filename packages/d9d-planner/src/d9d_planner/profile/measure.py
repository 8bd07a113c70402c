"""Measured time of a built job's steps: by kind of work, in waits for data, and on the host."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from d9d_engine.profiling.profiler import spans_of
from d9d_engine.profiling.summary import time_by_kind
from torch.profiler import ProfilerActivity, profile, schedule, supported_activities

if TYPE_CHECKING:
    from d9d_engine.run.trainer import Trainer


@dataclass(frozen=True)
class Measured:
    """Measured times of steps on one rank, in seconds per step.

    Attributes:
        step: seconds of a step, without a profiler.
        waits: seconds in which the step waits for its data.
        host: seconds that the host spends in a step, without waits for data: it launches the kernels.
        tail: seconds that the device still computes after the host has launched all timed steps; 0 on a CPU.
        kinds: kind of work -> seconds, in steps recorded by a profiler. On a CPU, ``idle`` is the time in which no
            operation runs. On a GPU, whose kernels the profiler does not slow down, it is the rest of ``step``.
        recorded: sum of ``kinds``: seconds of a recorded step on a CPU, else about ``step``.
        tokens: tokens of a step, over all processes.
        memory: peak of the allocated bytes on a GPU; ``None`` on a CPU.
        on_device: whether ``kinds`` are times of a GPU.
    """

    step: float
    waits: float
    host: float
    tail: float
    kinds: dict[str, float]
    recorded: float
    tokens: float
    memory: int | None
    on_device: bool


def measure(trainer: Trainer, warmup: int, timed: int, recorded: int) -> Measured:
    """Run steps of a built job without logging and saving. Collective over all ranks.

    Args:
        trainer: trainer of the job; its run is not opened.
        warmup: steps before the measurement, in which blocks are compiled.
        timed: steps that are timed.
        recorded: steps that a profiler records.
    """
    device, number = trainer.topology.device, 0

    def one_step() -> tuple[float, float, torch.Tensor]:
        nonlocal number
        trainer.topology.watchdog.phase("step", number)
        begin = time.perf_counter()
        with trainer.step.ranges("data wait"):
            pack = trainer.prefetcher.next()
        ready = time.perf_counter()
        result = trainer.step(number, pack)
        number += 1
        return ready - begin, time.perf_counter() - ready, result.tokens

    for _ in range(warmup):
        one_step()
    _synchronise(device)
    begin = time.perf_counter()
    taken = [one_step() for _ in range(timed)]
    launched = time.perf_counter()
    _synchronise(device)
    end = time.perf_counter()
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    kinds, total = _recorded(device, recorded, one_step, trainer)
    step = (end - begin) / timed
    if device.type != "cpu":
        kinds, total = _with_idle(kinds, step)
    return Measured(
        step=step,
        waits=sum(waits for waits, _, _ in taken) / timed,
        host=sum(host for _, host, _ in taken) / timed,
        tail=end - launched,
        kinds=kinds,
        recorded=total,
        tokens=sum(float(tokens) for _, _, tokens in taken) / timed,
        memory=memory,
        on_device=device.type != "cpu",
    )


def _with_idle(kinds: Mapping[str, float], step: float) -> tuple[dict[str, float], float]:
    """Seconds by kind of work, with ``idle`` as the rest of the step, and their sum, at least ``step``."""
    busy = sum(taken for kind, taken in kinds.items() if kind != "idle")
    total = max(step, busy)
    return {**kinds, "idle": total - busy}, total


def _recorded(
    device: torch.device, count: int, one_step: Callable[[], object], trainer: Trainer
) -> tuple[dict[str, float], float]:
    """Seconds per step by kind of work, and of a whole step, from a profiler."""
    activities = {ProfilerActivity.CPU}
    if device.type != "cpu":
        activities |= set(supported_activities())  # type: ignore[no-untyped-call]
    # Without this, Kineto prints lines on standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    trainer.step.ranges.on = True
    with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=count), acc_events=True) as profiler:
        for done in range(count + 1):
            one_step()
            if done == count:
                _synchronise(device)
            profiler.step()
    trainer.step.ranges.on = False
    times, total = time_by_kind(spans_of(profiler), count)
    return {kind: taken / 1e6 / count for kind, taken in times.items()}, total / 1e6 / count


def _synchronise(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)

"""Time of a step by kind of work, and the achieved rates of matmul, attention and optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from d9d_engine.profiling.profiler import spans_of
from d9d_engine.profiling.summary import STEP, time_by_kind
from settings import Setting
from timing import synchronise
from torch.profiler import ProfilerActivity, profile, record_function

#: Number of recorded steps.
RECORDED = 2


def work_by_kind(step: Callable[[], Any], device: torch.device) -> dict[str, float]:
    """Milliseconds of a step by kind, see :func:`d9d_engine.profiling.summary.time_by_kind`."""
    # Silences log lines of torch's profiler library.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    synchronise()
    with profile(activities=activities, acc_events=True) as recorded:
        for number in range(RECORDED):
            with record_function(f"{STEP}#{number}"):
                step()
        synchronise()
    times, _ = time_by_kind(spans_of(recorded), RECORDED)
    return {kind: microseconds / 1e3 / RECORDED for kind, microseconds in times.items()}


def roofline(
    setting: Setting, kinds: dict[str, float], parameters: int, optimizer_bytes: int | None = None
) -> dict[str, float]:
    """Achieved rates by kind of work.

    Args:
        setting: setting of the comparison.
        kinds: milliseconds of a step by kind of work.
        parameters: number of trained parameters.
        optimizer_bytes: see :class:`~contender.Contender`.

    Returns:
        ``matmul_tflops`` and ``attention_tflops``, of the FLOPs in the formula (attention as if every sample were one
        document; without recomputation), and ``optimizer_tbps``: terabytes per second of the weights, gradients and
        states that AdamW reads and writes; the norm of clipping reads gradients once more.
    """
    matmul = setting.matmul_flops_per_token() * setting.tokens
    attention = setting.flops_per_token() * setting.tokens - matmul
    # Weight, gradient and two states are read, weight and states written.
    moved = (optimizer_bytes or 7 * setting.width) * parameters
    found = {}
    for name, amount, kind in (
        ("matmul_tflops", matmul, "matmul"),
        ("attention_tflops", attention, "attention"),
        ("optimizer_tbps", moved, "optimizer"),
    ):
        if kinds.get(kind, 0) > 0:
            found[name] = amount / (kinds[kind] / 1e3) / 1e12
    return found

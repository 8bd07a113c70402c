"""Timing of steps on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


def synchronise() -> None:
    """Wait for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(run: Callable[[], Any], steps: int) -> float:
    """Seconds per step."""
    synchronise()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    synchronise()
    return (time.perf_counter() - start) / steps

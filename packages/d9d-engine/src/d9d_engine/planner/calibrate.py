"""Measurement of the rates of the device at hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from d9d_engine.planner.device import Device

_REPEATS = 7
#: Part of the rate of a copy to another device that arrives in collectives.
_OF_A_COPY = 0.8


def calibrated(device: torch.device, known: Device) -> tuple[Device, list[str]]:
    """Rates of a device, and the names of those that were measured. Takes seconds and 4 GiB of an accelerator.

    Measured are products, attention, copies, memory and, where there is a second device, the link to it. Grouped
    products and elementwise ops keep their ratio to products and copies; the network stays as it is known.

    Args:
        device: what to measure.
        known: rates that are not measured.
    """
    large = device.type != "cpu"
    found: dict[str, Any] = {
        "product": _product(device, torch.bfloat16, 8192 if large else 256),
        "product_float32": _product(device, torch.float32, 4096 if large else 256),
        "attention": _attention(device, 4096 if large else 128),
        "copy_bytes": _copy(device, device, (1 << 30) if large else (1 << 24)),
    }
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.mem_get_info(device)[1] / 2**30
        if torch.cuda.device_count() > 1:
            other = torch.device("cuda", (torch.cuda.current_device() + 1) % torch.cuda.device_count())
            found["link"] = _OF_A_COPY * _copy(device, other, 1 << 30) / 2  # one side reads, the other one writes
    measured = list(found)
    found["grouped_product"] = known.grouped_product * found["product"] / known.product
    found["elementwise_bytes"] = known.elementwise_bytes * found["copy_bytes"] / known.copy_bytes
    return known.model_copy(update=found), measured


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median time of a run, after two that do not count."""
    taken = []
    for _ in range(_REPEATS + 2):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[2:])


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _product(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Operations of a second in a product of random square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = 10  # so that the launch does not count
    return times * 2 * size**3 / _seconds(device, lambda: [a @ b for _ in range(times)])


def _attention(device: torch.device, length: int) -> float:
    """Operations of a second in causal attention, forward and backward: 7 products over half of all pairs."""
    shape = (4, 16, length, 128)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.ones(shape, device=device, dtype=torch.bfloat16)

    def run() -> None:
        out = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    flops = 7 * 2 * 4 * 16 * 128 * length**2 / 2
    return flops / _seconds(device, run)


def _copy(source: torch.device, target: torch.device, size: int) -> float:
    """Bytes of a second that a copy reads and writes."""
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for device in (source, target))
    return 2 * size / _seconds(source, lambda: b.copy_(a))

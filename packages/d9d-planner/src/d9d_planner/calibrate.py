"""Measurement of the rates of this machine's device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from d9d_planner.device import Device
from d9d_planner.links.measure import measured_link

_REPEATS = 7


def calibrated(device: torch.device, known: Device, devices: int) -> tuple[Device, list[str]]:
    """Measure the rates of a device. Takes seconds, and 4 GiB of an accelerator's memory.

    Measures matrix products, attention, copies, memory size and, with several devices, collectives between them, with
    one process per device. The rates of grouped products and elementwise ops keep their ratio to products and copies;
    network rates are not measured.

    Args:
        device: device to measure.
        known: rates to use where none are measured.
        devices: number of devices of this machine for the collectives; on the CPU, number of processes.

    Returns:
        The device's rates, and the names of the measured fields.

    Raises:
        TrainingError: the collectives could not be measured.
    """
    large = device.type != "cpu"
    found: dict[str, Any] = {
        "product": _product(device, torch.bfloat16, 8192 if large else 256),
        "product_float32": _product(device, torch.float32, 4096 if large else 256),
        "attention": _attention(device, 4096 if large else 128),
        "copy_bytes": _copy(device, (1 << 30) if large else (1 << 24)),
    }
    if device.type == "cuda":
        found["memory_gib"] = torch.cuda.mem_get_info(device)[1] / 2**30
        torch.cuda.empty_cache()  # frees memory for the other processes
    if devices > 1:
        found |= measured_link(device.type, devices)
    measured = list(found)
    if not large:
        found["attention_half"] = 0.0  # the ratio of lengths was measured on GPUs
    found["grouped_product"] = known.grouped_product * found["product"] / known.product
    found["elementwise_bytes"] = known.elementwise_bytes * found["copy_bytes"] / known.copy_bytes
    return known.model_copy(update=found), measured


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median seconds of a run, after two warm-up runs."""
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
    """FLOP/s of a product of random square matrices."""
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    times = 10  # so many that their time hides the launch time
    return times * 2 * size**3 / _seconds(device, lambda: [a @ b for _ in range(times)])


def _attention(device: torch.device, length: int) -> float:
    """FLOP/s of causal attention, forward and backward: 7 matrix products over half of all pairs."""
    shape = (4, 16, length, 128)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.ones(shape, device=device, dtype=torch.bfloat16)

    def run() -> None:
        out = functional.scaled_dot_product_attention(query=query, key=key, value=value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    flops = 7 * 2 * 4 * 16 * 128 * length**2 / 2
    return flops / _seconds(device, run)


def _copy(device: torch.device, size: int) -> float:
    """Bytes per second that a copy within the device reads and writes."""
    a, b = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * size / _seconds(device, lambda: b.copy_(a))

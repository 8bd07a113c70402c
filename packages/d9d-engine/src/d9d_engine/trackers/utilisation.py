"""Utilisation of the device: model FLOPs utilisation and memory, as logged series. Never waits for the device."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

#: Part of a device's name -> the vendor's peak in TFLOP/s for dense bfloat16; more specific names come first.
_PEAKS: Mapping[str, float] = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "GH200": 989.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H800": 989.0,
    "H20": 148.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
    "L40": 181.0,
    "L4": 121.0,
    "A40": 149.7,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    "MI325X": 1307.0,
    "MI300X": 1307.0,
    "MI250X": 191.5,  # of one of two dies; each die is a device
}
_GIB = 2**30
_STATUS = Path("/proc/self/status")


class Utilisation:
    """Computes the series ``mfu`` and ``memory/...`` of a log entry, without waiting for the device.

    ``mfu`` is model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B): tokens per second times the model's
    FLOPs per token, forward and backward, over the peak of all devices. Recomputed activations do not count.

    Args:
        device: device of this process.
        devices: number of devices that train together.
        flops_per_token: FLOPs per token of forward and backward; ``None`` if unknown.
        peak_tflops: peak of a device in TFLOP/s; by default the vendor's, for GPUs in this module's table.
        memory: whether to log memory; by default on GPUs only. CPU values differ from run to run.
    """

    def __init__(
        self,
        device: torch.device,
        devices: int,
        flops_per_token: float | None,
        peak_tflops: float | None = None,
        memory: bool | None = None,
    ) -> None:
        self._device = device
        self._memory = device.type == "cuda" if memory is None else memory
        if peak_tflops is None and device.type == "cuda":
            peak_tflops = known_peak(torch.cuda.get_device_name(device))
        self._per_token = None  # MFU per (token / s)
        if flops_per_token is not None and peak_tflops is not None:
            self._per_token = flops_per_token / (peak_tflops * 1e12 * devices)

    def __call__(self, tokens_per_second: float) -> dict[str, float]:
        """Values of a log entry: series -> value; memory values are the peaks of this process since its start."""
        mfu = {} if self._per_token is None else {"mfu": tokens_per_second * self._per_token}
        return mfu | (self._memory_values() if self._memory else {})

    def _memory_values(self) -> dict[str, float]:
        if self._device.type == "cuda":
            return {
                "memory/allocated_gib": torch.cuda.max_memory_allocated(self._device) / _GIB,
                "memory/reserved_gib": torch.cuda.max_memory_reserved(self._device) / _GIB,
            }
        resident = resident_bytes()
        return {} if resident is None else {"memory/resident_gib": resident / _GIB}


def known_peak(name: str) -> float | None:
    """Peak in TFLOP/s of the device with this name; ``None`` if unknown."""
    words = f" {name.replace('-', ' ')} "
    return next((peak for part, peak in _PEAKS.items() if f" {part} " in words), None)


def resident_bytes() -> int | None:
    """Peak resident memory of this process so far, in bytes; ``None`` if the system does not report it."""
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)

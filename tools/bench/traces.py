"""Kernels that ran on the GPU, as recorded by torch's profiler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

#: Part of the name of a marker kernel, which no model launches.
MARKER = "erfinv"


def recorded(work: Callable[[], None], device: torch.device, trace: Path | None = None) -> list[Kernel]:
    """Kernels that a function launches.

    Args:
        work: function to record; it returns when the device has finished.
        device: device to record.
        trace: file for the Chrome trace.
    """
    cuda = device.type == "cuda"
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if cuda else kinds.CPU]) as profile:
        torch.zeros(1, device=device).erfinv()  # identifies the calling thread
        work()
    with tempfile.TemporaryDirectory() as directory:
        path = trace or Path(directory, "trace.json")
        profile.export_chrome_trace(str(path))
        return kernels(json.loads(path.read_text())["traceEvents"])


class Kernel(NamedTuple):
    """Kernel that ran on the device; times in microseconds."""

    name: str
    begin: float
    end: float
    stream: int
    side: str

    @property
    def kind(self) -> str:
        """``exchange`` (sends, receives, all-to-all, copies between GPUs), ``other communication`` or ``compute``."""
        name = self.name.lower()
        if "sendrecv" in name or "alltoall" in name or "ptop" in name:
            return "exchange"
        return "other communication" if "nccl" in name else "compute"


def kernels(events: Sequence[dict[str, Any]]) -> list[Kernel]:
    """Kernels in a Chrome trace."""
    launched = {
        event["args"]["correlation"]: event["tid"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    ran = [event for event in events if event.get("cat") == "kernel" or _between_gpus(event)]
    forward = {launched.get(event["args"].get("correlation")) for event in ran if MARKER in event["name"]} - {None}
    found = []
    for event in ran:
        thread = launched.get(event["args"].get("correlation"))
        side = "unknown" if thread is None or not forward else "forward" if thread in forward else "backward"
        begin = event["ts"]
        found.append(Kernel(event["name"], begin, begin + event["dur"], event["args"].get("stream", -1), side))
    return [kernel for kernel in found if MARKER not in kernel.name]


def _between_gpus(event: dict[str, Any]) -> bool:
    """Whether the event is a copy from one GPU to another."""
    return event.get("cat") == "gpu_memcpy" and "PtoP" in event["name"]


def merged(some: Iterable[Kernel]) -> list[tuple[float, float]]:
    """Union of the kernels' intervals: starts and ends in order, in microseconds."""
    union: list[tuple[float, float]] = []
    for begin, end in sorted((kernel.begin, kernel.end) for kernel in some):
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((begin, end))
    return union


def covered(spans: Iterable[Kernel], by: Iterable[Kernel]) -> float:
    """Microseconds of ``spans`` during which any of ``by`` runs; overlapping spans count twice."""
    union = merged(by)
    total, at = 0.0, 0
    for span in sorted(spans, key=lambda kernel: kernel.begin):
        while at < len(union) and union[at][1] <= span.begin:
            at += 1
        for begin, end in union[at:]:
            if begin >= span.end:
                break
            total += min(end, span.end) - max(begin, span.begin)
    return total

"""Table of the time of profiled steps by kind of work, from a profiler's public events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from d9d_engine.profiling.ranges import OPTIMIZER, PREFIX

#: Prefix of the name of the range that torch puts around each recorded step.
STEP = "ProfilerStep"
Kind = Literal["optimizer", "attention", "matmul", "other", "communication"]
#: Kinds of work in order of priority: of several kinds that run at the same time, only the first is counted.
_ORDER: tuple[Kind, ...] = ("optimizer", "attention", "matmul", "other", "communication")
LABELS = {
    "matmul": "matmul",
    "attention": "attention",
    "other": "elementwise, other",
    "communication": "communication exposed",
    "optimizer": "optimizer",
    "idle": "idle",
}
#: Patterns in lower-case names of operations and kernels; an operation includes the operations that it calls.
_NAMES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("communication", re.compile(r"nccl|gloo|c10d|allreduce|all_reduce|allgather|all_gather|reducescatter|_c10d_")),
    ("attention", re.compile(r"attention|flash|fmha|sdpa")),
    (
        "matmul",
        re.compile(r"gemm|cutlass|cublas|nvjet|matmul|grouped_mm|::(add|b|sp)?mm\b|::baddbmm|::(bi)?linear\b|conv"),
    ),
)
#: Pattern in the names of Inductor's fused elementwise kernels. These names also contain adjacent ops, such as a matrix
#: product. Inductor's own matrix products and attention have ``tem`` at this place of the name.
_BETWEEN = re.compile(r"triton_(poi|per|red|mix|for)_")


@dataclass(frozen=True, slots=True)
class Span:
    """Span of one operation or kernel.

    Attributes:
        name: name of the operation, kernel or range.
        start: start time in microseconds.
        end: end time in microseconds.
        on_device: whether it ran on an accelerator.
        is_range: whether it is a named range rather than an operation.
    """

    name: str
    start: float
    end: float
    on_device: bool = False
    is_range: bool = False


def kind_of(span: Span) -> Kind | None:
    """Kind of work that a span's name indicates; ``None`` if the name does not tell, such as the name of a phase."""
    # torch's optimizers open their own range in a step, and kernels belong to the innermost range.
    if span.name == PREFIX + OPTIMIZER or span.name.startswith("Optimizer.step#"):
        return "optimizer"
    name = span.name.lower()
    if _BETWEEN.match(name):
        return "other"
    for kind, pattern in _NAMES:
        # Communication libraries open ranges for their calls.
        if pattern.search(name) and (kind == "communication" or not span.is_range):
            return kind
    return None if span.is_range or name.startswith("autograd::") else "other"


def time_by_kind(spans: Iterable[Span], count: int) -> tuple[dict[str, float], float]:
    """Split the recorded time of profiled steps by kind of work; each moment is counted once.

    The accelerator's time is split if any kernel ran there, else the CPU's time. A moment counts as communication only
    if no other kind of work runs, as optimizer while the optimizer's range is open, and as ``idle`` while no operation
    runs.

    Args:
        spans: spans of all threads and streams.
        count: number of completely recorded steps.

    Returns:
        Microseconds by kind, and in total.
    """
    spans = list(spans)
    steps = sorted(
        (span for span in spans if span.name.startswith(STEP)), key=lambda span: (span.on_device, span.start)
    )
    on_device = [span for span in spans if span.on_device and span not in steps and not span.is_range]
    if on_device:
        # The device lags behind the CPU, so the device's first and last spans bound its recorded time.
        start, end = min(span.start for span in on_device), max(span.end for span in on_device)
    else:
        start, end = steps[0].start, steps[count - 1].end
    changes: list[tuple[float, int, int]] = []
    for span in spans:
        kind = kind_of(span) if span.on_device == bool(on_device) and span not in steps else None
        if kind is not None and span.end > start and span.start < end:
            changes.append((max(span.start, start), _ORDER.index(kind), 1))
            changes.append((min(span.end, end), _ORDER.index(kind), -1))
    times: dict[str, float] = dict.fromkeys((*_ORDER, "idle"), 0.0)
    running, now = [0] * len(_ORDER), start
    for at, kind_index, change in sorted(changes):
        times[_first(running)] += at - now
        now = at
        running[kind_index] += change
    times["idle"] += end - now
    return times, end - start


def _first(running: list[int]) -> str:
    return next((kind for kind, count in zip(_ORDER, running, strict=True) if count), "idle")


def table(times: Mapping[str, float], total: float, steps: int, title: str) -> str:
    """Plain-text table of the time by kind, in milliseconds per step and in percent.

    Args:
        times: kind -> microseconds.
        total: microseconds in total.
        steps: number of recorded steps.
        title: title of the table.
    """
    rows = [
        f"  {label:<22} {times[kind] / 1000 / steps:10.2f} ms {times[kind] / total if total else 0:7.1%}"
        for kind, label in LABELS.items()
    ]
    return "\n".join([f"{title}: {total / 1000 / steps:.2f} ms per step", *rows])

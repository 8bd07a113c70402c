"""Table of the time of profiled steps by kind, from the public events of a profiler."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from d9d_engine.profiling.ranges import OPTIMIZER, PREFIX

#: Begin of the name of the range that torch puts around each recorded step.
STEP = "ProfilerStep"
Kind = Literal["optimizer", "attention", "matmul", "other", "communication"]
#: Most telling first: where several kinds run at the same time, the first one counts.
_ORDER: tuple[Kind, ...] = ("optimizer", "attention", "matmul", "other", "communication")
_LABELS = {
    "matmul": "matmul",
    "attention": "attention",
    "other": "elementwise, other",
    "communication": "communication exposed",
    "optimizer": "optimizer",
    "idle": "idle",
}
#: Parts of the names of operations and kernels, in lower case; an operation contains those that it calls.
_NAMES: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    ("communication", re.compile(r"nccl|gloo|c10d|allreduce|all_reduce|allgather|all_gather|reducescatter|_c10d_")),
    ("attention", re.compile(r"attention|flash|fmha|sdpa")),
    (
        "matmul",
        re.compile(r"gemm|cutlass|cublas|nvjet|matmul|grouped_mm|::(add|b|sp)?mm\b|::baddbmm|::(bi)?linear\b|conv"),
    ),
)
#: Inductor's own kernels, named after all that they stand between; products and attention are its templates (``tem``).
_BETWEEN = re.compile(r"triton_(poi|per|red|mix|for)_")


@dataclass(frozen=True, slots=True)
class Span:
    """Span of one operation or kernel.

    Attributes:
        name: of the operation, kernel or range.
        start: microseconds.
        end: microseconds.
        on_device: ran on an accelerator.
        is_range: a range that somebody named, and no operation.
    """

    name: str
    start: float
    end: float
    on_device: bool = False
    is_range: bool = False


def kind_of(span: Span) -> Kind | None:
    """Kind of the work in a span; ``None`` if it says nothing about work, as a range of a phase."""
    # A step of torch's own optimizers opens a range of theirs, and kernels belong to the innermost one.
    if span.name == PREFIX + OPTIMIZER or span.name.startswith("Optimizer.step#"):
        return "optimizer"
    name = span.name.lower()
    if _BETWEEN.match(name):
        return "other"
    for kind, pattern in _NAMES:
        # Communication libraries announce their calls as ranges.
        if pattern.search(name) and (kind == "communication" or not span.is_range):
            return kind
    return None if span.is_range or name.startswith("autograd::") else "other"


def time_by_kind(spans: Iterable[Span], count: int) -> tuple[dict[str, float], float]:
    """Sum up profiled steps: split their recorded time by kind; every moment counts once.

    The time is that of the accelerator if anything ran there, and of the CPU otherwise. Communication counts where
    nothing else runs beside it, the optimizer where its range is open, ``idle`` where no operation runs.

    Args:
        spans: of all threads and streams.
        count: steps that were recorded to their end.

    Returns:
        Microseconds by kind, and of the whole.
    """
    spans = list(spans)
    steps = sorted(
        (span for span in spans if span.name.startswith(STEP)), key=lambda span: (span.on_device, span.start)
    )
    on_device = [span for span in spans if span.on_device and span not in steps and not span.is_range]
    if on_device:
        # The device runs behind the CPU: its own first and last moment bound what was recorded of it.
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
        times: microseconds by kind.
        total: microseconds of all.
        steps: how many were recorded.
        title: of the table.
    """
    rows = [
        f"  {label:<22} {times[kind] / 1000 / steps:10.2f} ms {times[kind] / total if total else 0:7.1%}"
        for kind, label in _LABELS.items()
    ]
    return "\n".join([f"{title}: {total / 1000 / steps:.2f} ms per step", *rows])

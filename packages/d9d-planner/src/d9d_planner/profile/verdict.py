"""Cause that limits the speed of a step, found from measured times, and changes that may help. Imports no torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from d9d_planner.profile.measure import Measured

#: Fractions of a step's time above which a cause is reported: waits for data, idle time of a GPU and of a CPU, exposed
#: communication, elementwise work, and the optimizer.
_WAITS, _IDLE, _IDLE_ON_CPU, _EXPOSED, _ELEMENTWISE, _OPTIMIZER = 0.1, 0.15, 0.4, 0.15, 0.4, 0.25
#: On a CPU, a step that takes more than this multiple of its predicted time is limited by the launch of operations.
_STARTS = 4.0
#: If the device computes for more than this fraction of a step after the last launch, it was not waiting for the host.
_TAIL = 0.5


@dataclass(frozen=True)
class Verdict:
    """Reason for the time of a step.

    Attributes:
        cause: short name: ``data``, ``host``, ``communication``, ``optimizer``, ``memory`` or ``compute``.
        reason: sentence with the measured share.
        advice: changes that may help, most of them in the job file.
    """

    cause: str
    reason: str
    advice: tuple[str, ...]


def verdict(
    found: Measured,
    predicted: float | None,
    strategies: Collection[str],
    data_fields: Collection[str],
    microbatches: int,
    processes: int,
) -> Verdict:
    """Find what limits the speed of a step: the first cause in a fixed order that takes more than its fraction.

    Args:
        found: measured times.
        predicted: predicted seconds of a step without waits and launches, if there is a prediction.
        strategies: names of the strategies of the job.
        data_fields: names of the fields of the dataset's config.
        microbatches: microbatches of a step on each rank.
        processes: processes of the job.
    """
    waits, idle = found.waits / found.step, _share(found, "idle")
    where = "the GPU" if found.on_device else "the processor"
    if waits > _WAITS:
        workers = ("data.workers: 4 reads and tokenises in other processes",) if "workers" in data_fields else ()
        return Verdict(
            "data",
            f"a step waits {waits:.0%} of its time for data",
            (*workers, "batch.prefetch: 8 evens out slow reads", "data on a local disk, or tokenised beforehand"),
        )
    if _is_host_bound(found, predicted):
        fewer = (f"batch.microbatch: larger; a step has {microbatches} microbatches",) if microbatches > 1 else ()
        compiled = () if "compile" in strategies else ("parallel: [compile] launches fewer, larger kernels",)
        return Verdict(
            "host",
            f"{where} is idle {idle:.0%} of the time and waits for the host, which starts each operation from Python"
            if found.on_device
            else "most time goes into starting operations from Python, since each of them is small",
            (*compiled, *fewer, "a larger model or longer samples give the device more work for each launch"),
        )
    exposed = _share(found, "communication")
    if exposed > _EXPOSED:
        return Verdict(
            "communication",
            f"{exposed:.0%} of a step is communication that nothing hides",
            (
                "d9d plan JOB finds a layout with less communication",
                "a larger batch per device, or hsdp in place of fsdp across machines",
            ),
        )
    if (share := _share(found, "optimizer")) > _OPTIMIZER:
        return Verdict(
            "optimizer",
            f"the optimizer takes {share:.0%} of a step",
            ("batch.size: larger, so that a step computes more per update",),
        )
    if (share := _share(found, "other")) > _ELEMENTWISE and found.on_device:
        compiled = () if "compile" in strategies else ("parallel: [compile] fuses elementwise operations",)
        return Verdict(
            "memory",
            f"elementwise operations, which are bound by memory, take {share:.0%} of a step",
            (*compiled, "kernel libraries: d9d doctor lists the ones that are missing"),
        )
    products = _share(found, "matmul") + _share(found, "attention")
    layouts = ("d9d plan JOB to compare layouts",) if processes > 1 else ()
    lower = ("precision: {autocast: bfloat16}, or the strategy fp8, if the job does not have it",)
    return Verdict(
        "compute",
        f"{where} is busy {1 - idle:.0%} of the time; matrix products and attention take {products:.0%}",
        (*layouts, *(lower if found.on_device else ("a GPU",))),
    )


def _is_host_bound(found: Measured, predicted: float | None) -> bool:
    if found.on_device:
        return found.tail < _TAIL * found.step and _share(found, "idle") > _IDLE
    # On a CPU, the time of an operation includes its launch, so only a prediction can tell the two apart.
    slower = predicted is not None and found.step - found.waits > _STARTS * predicted
    return slower or _share(found, "idle") > _IDLE_ON_CPU


def _share(found: Measured, kind: str) -> float:
    """Fraction of the recorded time of a step that a kind of work takes."""
    return found.kinds.get(kind, 0.0) / found.recorded if found.recorded else 0.0

"""Tables and lines about predictions. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from d9d_planner.prediction import Prediction
from d9d_planner.search import Found

_GIB = 2**30
#: Parts of the memory that follow from other parts, or hardly depend on the layout.
_NOT_CHOSEN = ("temporary", "driver and gaps")


def memory_line(prediction: Prediction) -> str:
    """Text about the predicted memory of the pipeline rank that needs the most."""
    memory, parts = prediction.memory, _parts(prediction)
    shown = ", ".join(f"{name} {size / _GIB:.1f}" for name, size in parts.items() if size >= 0.05 * _GIB)
    rank = ""
    if len(prediction.ranks) > 1:
        at = prediction.ranks.index(memory)
        least = min(other.needed for other in prediction.ranks)
        rank = f" on pipeline rank {at}, {least / _GIB:.1f} on the emptiest"
    return f"{memory.needed / _GIB:.1f} GiB{rank} ({shown})"


def largest(prediction: Prediction) -> str:
    """Text with the three largest parts of the memory that depend on the layout, and any part above half of it."""
    parts = {name: size for name, size in _parts(prediction).items() if size >= 0.05 * _GIB}
    chosen = sorted((name for name in parts if name not in _NOT_CHOSEN), key=lambda name: -parts[name])[:3]
    others = [name for name in parts if name in _NOT_CHOSEN and parts[name] > prediction.memory.needed / 2]
    return ", ".join(f"{name} {parts[name] / _GIB:.1f}" for name in [*chosen, *others])


def advice(prediction: Prediction, usual: str) -> str:
    """Advice for a job that does not fit: ``usual``, unless the device is too small for any job.

    Args:
        prediction: predicted memory, and the device.
        usual: advice if a smaller job could fit.
    """
    outside = prediction.memory.outside
    if outside < prediction.device.memory:
        return usual
    return f"the driver and libraries alone need {outside / _GIB:.1f} GiB, so use a device with more memory"


def _parts(prediction: Prediction) -> dict[str, float]:
    """Parts of the predicted memory in bytes, by their names in tables."""
    memory = prediction.memory
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "activations": memory.activations,
        "logits": memory.logits,
        "temporary": memory.workspace,
        "communication": memory.communication,
        "driver and gaps": memory.outside + memory.fragmentation,
    }


def time_line(prediction: Prediction) -> str:
    """Line about the predicted time of a step."""
    time = prediction.time
    parts = ", ".join(
        f"{name} {taken / time.total:.0%}" for name, taken in time.parts.items() if taken > 0.01 * time.total
    )
    return f"{time.total:.3g} s, {prediction.tokens_per_second:,.0f} tokens/s on each device ({parts})"


def plan_table(found: Found, rows: Sequence[Prediction]) -> Table:
    """Make a table of layouts, the fastest first, with a mark for the Pareto front of time and memory."""
    front = {id(prediction) for prediction in found.pareto}
    table = Table(box=None, header_style="bold")
    for name in ("", "seconds", "tokens/s", "GiB", "", "mesh", "strategies", "microbatch", "bound by"):
        table.add_column(name, justify="right" if name in ("", "seconds", "tokens/s", "GiB") else "left")
    for number, prediction in enumerate(rows, 1):
        layout = prediction.layout
        mesh, _, strategies = str(layout).partition(", ")
        table.add_row(
            str(number),
            f"{prediction.time.total:.3f}",
            f"{prediction.tokens_per_second:,.0f}",
            f"{prediction.memory.needed / _GIB:.1f}",
            "*" if id(prediction) in front else "",
            mesh,
            strategies,
            f"{layout.microbatches} x {layout.microbatch}",
            _bound(prediction),
        )
    return table


def _bound(prediction: Prediction) -> str:
    """Text about the limits of a layout: the largest part of its time, and memory if it is more than 90 % full."""
    full = prediction.memory.needed / prediction.device.memory
    return prediction.time.bound + (f", memory {full:.0%} full" if full > 0.9 else "")

"""Tables and JSON that ``d9d pipeline`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from d9d_core.terminal.console import console_for
from rich.table import Table

from d9d_pipeline.simulator.result import Simulation

#: Number of ranks shown at each end of a long pipeline.
_SHOWN = 8


@dataclass(frozen=True)
class Row:
    """Row of the table of ``d9d pipeline compare``: the result of one schedule.

    Attributes:
        name: name of the schedule.
        simulation: simulation of a step; ``None`` if the schedule has none.
        limit: memory limit of a rank, in units of the activations of one microbatch in all stages of the rank.
        stages: number of stages on each rank.
        problem: reason why there is no simulation.
    """

    name: str
    simulation: Simulation | None
    limit: float | None = None
    stages: int = 0
    problem: str = ""

    @property
    def too_large(self) -> bool:
        """Whether a rank would hold more activations than ``limit``."""
        return self.simulation is not None and self.limit is not None and max(self.simulation.peak_live) > self.limit

    @property
    def note(self) -> str:
        """Reason to reject this schedule; empty if there is none."""
        return self.problem or ("over the memory limit" if self.too_large else "")

    def order(self) -> tuple[bool, bool, float, float, str]:
        """Sort key: schedules within the limit first, then by time, then by memory."""
        if self.simulation is None:
            return True, True, 0.0, 0.0, self.name
        # Rounded, because equal times, computed as different sums, may differ in their last digits.
        time = round(self.simulation.makespan, 9)
        return False, self.too_large, time, max(self.simulation.peak_live), self.name

    def facts(self) -> dict[str, Any]:
        """Simulated numbers of the row's schedule, for JSON."""
        facts = {"schedule": self.name, "stages_per_rank": self.stages, "note": self.note}
        return facts | (summary(self.simulation) if self.simulation else {})


def summary(simulation: Simulation) -> dict[str, Any]:
    """Numbers of a simulated step, for JSON."""
    return {
        "time": simulation.makespan,
        "bubble": simulation.bubble,
        "inner_bubble": simulation.inner_bubble,
        "peak_live": list(simulation.peak_live),
        "inbox": list(simulation.inbox),
        "sent": simulation.sent,
        "critical_path": [str(action) for action in simulation.critical_path],
    }


def print_simulation(simulation: Simulation, title: str) -> None:
    """Print a simulated step: the numbers of all ranks, or of both ends of a long pipeline."""
    console = console_for()
    table = Table(box=None, header_style="bold", title=title, title_justify="left", title_style="bold")
    for name in ("rank", "stages", "computes", "idle", "holds", "offers", "sends"):
        table.add_column(name, justify="left" if name == "stages" else "right", no_wrap=True)
    for rank in range(simulation.ranks):
        if simulation.ranks > 2 * _SHOWN and rank == _SHOWN:
            table.add_row("...")
        if _SHOWN <= rank < simulation.ranks - _SHOWN:
            continue
        idle = 1 - simulation.busy[rank] / simulation.makespan if simulation.makespan else 0.0
        table.add_row(
            str(rank),
            ", ".join(map(str, simulation.stages(rank))),
            f"{simulation.busy[rank]:.4g}",
            f"{idle:.1%}",
            f"{simulation.peak_live[rank]:.4g}",
            str(simulation.inbox[rank]),
            str(simulation.sent[rank]),
        )
    console.print(table)
    path = simulation.critical_path
    shown = " ".join(map(str, path[:12])) + (f" ... {path[-1]}" if len(path) > 12 else "")
    facts = Table(box=None, show_header=False)
    facts.add_row("time", f"{simulation.makespan:.6g}")
    facts.add_row(
        "bubble", f"{simulation.bubble:.2%}; {simulation.inner_bubble:.2%} inside the work of the idlest rank"
    )
    facts.add_row("holds", f"at most {max(simulation.peak_live):.4g} microbatches through all stages of a rank")
    facts.add_row("offers", f"memory for at most {max(simulation.inbox)} tensors before they are used")
    facts.add_row("sends", f"{simulation.volume} tensors between ranks")
    facts.add_row("critical", f"{len(path)} actions: {shown}")
    console.print(facts)


def print_comparison(rows: Sequence[Row], title: str, limit: float | None) -> None:
    """Print a table with one line for each schedule."""
    within = "" if limit is None else f", at most {limit:g} held"
    table = Table(box=None, header_style="bold", title=title + within, title_justify="left", title_style="bold")
    for name in ("", "schedule", "stages", "time", "bubble", "inner", "holds", "sends", "note"):
        table.add_column(name, justify="left" if name in ("schedule", "note") else "right", no_wrap=name != "note")
    place = 0
    for row in rows:
        simulation = row.simulation
        place += not row.note
        cells = [str(place) if not row.note else "", row.name]
        if simulation is not None:
            cells += [str(row.stages), f"{simulation.makespan:.6g}", f"{simulation.bubble:.1%}"]
            cells += [f"{simulation.inner_bubble:.1%}", f"{max(simulation.peak_live):.4g}", str(simulation.volume)]
        else:
            cells += ["-"] * 6
        table.add_row(*cells, row.note, style="dim" if row.note else None)
    console_for().print(table)

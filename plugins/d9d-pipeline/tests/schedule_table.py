"""The table and the pictures in the README: ours, the papers', and the schedules of torch.distributed.pipelining.

    python plugins/d9d-pipeline/tests/schedule_table.py    write README.md and pictures/

A test makes the same and compares, so they cannot go stale.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from d9d_core.schedule import Program
from d9d_pipeline.schedule.breadth_first import gpipe, looped_bfs
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.one_forward_one_backward import (
    interleaved_one_forward_one_backward,
    one_forward_one_backward,
)
from d9d_pipeline.schedule.zero_bubble import zb1p
from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v
from d9d_pipeline.simulator.costs import Costs
from d9d_pipeline.simulator.picture import draw
from d9d_pipeline.simulator.result import Simulation
from d9d_pipeline.simulator.run import simulate

README = Path(__file__).parents[1] / "README.md"
PICTURES = README.with_name("pictures")
MARKS = "<!-- schedules: begin -->", "<!-- schedules: end -->"
RANKS = (2, 4, 8, 16)
ROUNDS = (1, 2, 4)
Generator = Callable[[int, int], Sequence[Program]]


@dataclass(frozen=True)
class Entry:
    """One schedule and the facts about it.

    Attributes:
        name: in the table.
        ours: makes its programs.
        idle: (ranks, microbatches) -> time that each rank idles by its paper, where a microbatch takes 3 on each rank;
            ``None`` where the paper says nothing.
        held: (ranks, microbatches) -> most microbatches that a rank holds by its paper.
        theirs: the class in torch.distributed.pipelining.
        stages: on each rank.
        least: microbatches for each rank.
    """

    name: str
    ours: Generator
    idle: Callable[[int, int], float | None]
    held: Callable[[int, int], float]
    theirs: str
    stages: int = 1
    least: int = 1


ENTRIES = (
    Entry("`gpipe`", gpipe, lambda p, m: 3 * (p - 1), lambda p, m: m, "ScheduleGPipe"),
    Entry("`looped_bfs`, 2 stages", looped_bfs, lambda p, m: 1.5 * (p - 1), lambda p, m: m, "ScheduleLoopedBFS", 2),
    Entry("`1f1b`", one_forward_one_backward, lambda p, m: 3 * (p - 1), min, "Schedule1F1B"),
    Entry(
        "`interleaved_1f1b`, 2 stages", interleaved_one_forward_one_backward, lambda p, m: 1.5 * (p - 1),
        lambda p, m: min(m, p + (p - 1) / 2), "ScheduleInterleaved1F1B", 2,
    ),
    Entry(
        "`interleaved_1f1b`, 4 stages", partial(interleaved_one_forward_one_backward, stages_per_rank=4),
        lambda p, m: 0.75 * (p - 1), lambda p, m: min(m, p + (p - 1) / 4), "ScheduleInterleaved1F1B", 4,
    ),
    Entry("`zb1p`", zb1p, lambda p, m: p - 1, min, "ScheduleInterleavedZeroBubble"),
    Entry(
        "`zb1p`, 2 stages", partial(zb1p, stages_per_rank=2), lambda p, m: (p - 1) / 2, min,
        "ScheduleInterleavedZeroBubble", 2,
    ),
    Entry(
        "`zero_bubble_v`", zero_bubble_v, lambda p, m: (p - 1) / 2 if m >= 2 * p - 1 else None, min,
        "ScheduleZBVZeroBubble", 2,
    ),
    Entry("`dual_pipe_v`", dual_pipe_v, lambda p, m: p - 1, lambda p, m: p + 0.5, "ScheduleDualPipeV", 2, least=2),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One schedule at one size."""

    entry: Entry
    ranks: int
    microbatches: int
    ours: Simulation
    theirs: Simulation

    @property
    def bubbles(self) -> list[str]:
        """In percent: ours, the paper's, torch's."""
        idle = self.entry.idle(self.ranks, self.microbatches)
        paper = None if idle is None else idle / (idle + 3 * self.microbatches)
        found = (self.ours.bubble, paper, self.theirs.bubble)
        return ["-" if bubble is None else f"{100 * bubble:.1f}" for bubble in found]

    @property
    def held(self) -> list[str]:
        """Microbatches: ours, the paper's, torch's."""
        paper = self.entry.held(self.ranks, self.microbatches)
        return [f"{most:g}" for most in (max(self.ours.peak_live), paper, max(self.theirs.peak_live))]


@dataclass(frozen=True)
class Pair:
    """Programs of one schedule at one size."""

    entry: Entry
    ranks: int
    microbatches: int
    ours: Sequence[Program]
    theirs: Sequence[Program]

    def simulate(self, costs: Costs | None = None) -> Cell:
        """Both with the same costs."""
        ours, theirs = simulate(self.ours, costs), simulate(self.theirs, costs)
        return Cell(self.entry, self.ranks, self.microbatches, ours, theirs)


def pairs() -> Iterator[Pair]:
    """All of them."""
    translated = torch_programs()
    for entry in ENTRIES:
        for ranks in RANKS:
            for rounds in (rounds for rounds in ROUNDS if rounds >= entry.least):
                size = ranks, ranks * rounds
                yield Pair(entry, *size, entry.ours(*size), translated(entry.theirs, *size, entry.stages))


def torch_programs() -> Callable[[str, int, int, int], list[Program]]:
    """The function of the neighbouring file."""
    found: Callable[..., list[Program]] = runpy.run_path(str(Path(__file__).with_name("torch_schedules.py")))[
        "torch_programs"
    ]
    return found


def table(cells: Iterable[Cell]) -> str:
    """Markdown."""
    sizes = ["pp" if rounds == 1 else f"{rounds} pp" for rounds in ROUNDS]
    heads = [head for size in sizes for head in (f"bubble, % ({size})", f"held ({size})")]
    lines = ["| " + " | ".join(["schedule", "pp", *heads]) + " |", "|" + "---|" * (2 + len(heads))]
    found = {(cell.entry.name, cell.ranks, cell.microbatches): cell for cell in cells}
    for entry in ENTRIES:
        for ranks in RANKS:
            words = [entry.name, str(ranks)]
            for rounds in ROUNDS:
                cell = found.get((entry.name, ranks, ranks * rounds))
                words += ["", ""] if cell is None else [triple(*cell.bubbles), triple(*cell.held)]
            lines.append("| " + " | ".join(words) + " |")
    return "\n".join(lines)


def pictures() -> dict[str, str]:
    """File name -> the timeline of a small step."""
    small: dict[str, Generator] = {
        "1f1b": one_forward_one_backward,
        "zero_bubble_v": zero_bubble_v,
        "dual_pipe_v": dual_pipe_v,
    }
    return {
        f"{name}.svg": draw(simulate(ours(4, 10)), f"{name}: 10 microbatches on 4 ranks")
        for name, ours in small.items()
    }


def triple(ours: str, paper: str, theirs: str) -> str:
    """One number where all agree."""
    return ours if ours == paper == theirs else f"{ours} / {paper} / {theirs}"


def between(text: str) -> tuple[str, str, str]:
    """Text before, between and after the marks."""
    before, begin, rest = text.partition(MARKS[0])
    inside, end, after = rest.partition(MARKS[1])
    assert begin, f"{README} has no {begin}"
    assert end, f"{README} has no {end}"
    return before + begin, inside, end + after


if __name__ == "__main__":
    before, _, after = between(README.read_text())
    README.write_text(f"{before}\n{table(pair.simulate() for pair in pairs())}\n{after}")
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PICTURES / name).write_text(text)

"""Timeline of a pipeline step, from the programs that a run recorded, with ideal times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from d9d_core.program.text import parse_programs
from d9d_core.schedule import (
    Action,
    Backward,
    Forward,
    InputBackward,
    MicrobatchAction,
    Program,
    WeightBackward,
    compute_parts,
)
from d9d_engine.run.directory import PROGRAMS

from d9d_reports.report.series import Chart

#: Type of action -> name in the legend, duration in units of a forward's duration, and colour.
_KINDS: dict[type[Action], tuple[str, float, str]] = {
    Forward: ("forward", 1, "#3f7fd0"),
    Backward: ("backward", 2, "#3a9a5b"),
    InputBackward: ("gradients of inputs", 1, "#2a9d9d"),
    WeightBackward: ("gradients of weights", 1, "#e0a03c"),
}
#: Largest number of computations in a chart.
_MOST = 6000


class Box(NamedTuple):
    """Box of a chart: one computation of a rank; times are in units of a forward's duration.

    An overlapped forward and backward are two boxes one after the other, the forward first.
    """

    rank: int
    action: MicrobatchAction
    begin: float
    length: float


def timeline_charts(runs: dict[str, Path]) -> list[Chart]:
    """Make a chart of one step of each run that recorded pipeline programs.

    Args:
        runs: shown name -> directory of the run.
    """
    charts = []
    for run, directory in runs.items():
        try:
            programs = parse_programs((directory / PROGRAMS).read_text("utf-8"))
        except (OSError, ValueError):  # no pipeline, or a damaged file
            continue
        title = "A step of the pipeline" if len(runs) == 1 else f"{run}: a step of the pipeline"
        charts.append(_chart(title, programs))
    return charts


def ideal_boxes(programs: Sequence[Program]) -> list[Box]:
    """Place the computations of all ranks on a timeline: each starts as early as possible; transfers take no time.

    Args:
        programs: programs of all ranks along ``pp``; computations in a deadlock are left out.
    """
    last = max((action.stage for program in programs for action in program), default=0)
    ended: dict[tuple[bool, int, int], float] = {}  # (is a forward, stage, microbatch)
    queues = [[a for a in program if all(type(p) in _KINDS for p in compute_parts(a))] for program in programs]
    at, clocks, boxes, moved = [0] * len(queues), [0.0] * len(queues), [], True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while at[rank] < len(queue):
                parts = [part for part in compute_parts(queue[at[rank]]) if isinstance(part, MicrobatchAction)]
                needs = [need for part in parts for need in _needs(part, last)]
                if any(need not in ended for need in needs):
                    break
                begin = max([clocks[rank], *(ended[need] for need in needs)])
                for part in parts:
                    length = _KINDS[type(part)][1]
                    boxes.append(Box(rank, part, begin, length))
                    begin += length
                for part in parts:
                    if not isinstance(part, WeightBackward):
                        ended[isinstance(part, Forward), part.stage, part.microbatch] = begin
                clocks[rank], at[rank], moved = begin, at[rank] + 1, True
    return boxes


def _needs(part: MicrobatchAction, last: int) -> Iterator[tuple[bool, int, int]]:
    if isinstance(part, Forward) and part.stage:
        yield True, part.stage - 1, part.microbatch
    if isinstance(part, Backward | InputBackward) and part.stage < last:
        yield False, part.stage + 1, part.microbatch


def _chart(title: str, programs: Sequence[Program]) -> Chart:
    boxes = ideal_boxes(programs)
    if len(boxes) > _MOST:
        return Chart(title, [], note=f"{len(boxes):,} computations are too many for a page; see {PROGRAMS}")
    end = max((box.begin + box.length for box in boxes), default=0.0)
    busy = sum(box.length for box in boxes)
    idle = 1 - busy / (end * len(programs)) if end else 0.0
    traces = []
    for kind, (label, _, colour) in _KINDS.items():
        mine = [box for box in boxes if type(box.action) is kind]
        if mine:
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": label,
                    "y": [f"rank {box.rank}" for box in mine],
                    "base": [box.begin for box in mine],
                    "x": [box.length for box in mine],
                    "text": [str(box.action.microbatch) for box in mine],
                    "customdata": [str(box.action) for box in mine],
                    "textposition": "inside",
                    "insidetextanchor": "middle",
                    "textangle": 0,
                    "constraintext": "none" if len(boxes) < 300 else "inside",
                    "marker": {"color": colour, "line": {"width": 0.5, "color": "#ffffff"}},
                    "hovertemplate": "%{customdata} on %{y}<extra></extra>",
                }
            )
    layout = {
        "barmode": "overlay",
        "bargap": 0.15,
        "showlegend": True,
        "xaxis": {"title": {"text": "time, in forwards of a stage"}},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }
    note = (
        "Ideal times: a forward takes 1, a backward 2, each half of a backward 1, a transfer nothing; "
        f"{idle:.0%} of the time is idle. Numbers are microbatches."
    )
    return Chart(title, traces, layout, note, height=min(max(150 + 32 * len(programs), 220), 900))

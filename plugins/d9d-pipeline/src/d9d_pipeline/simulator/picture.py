"""Timeline of a simulated step as a picture.

Rows are ranks, time runs to the right, numbers are microbatches. The first stage of a rank is pale, its last stage
dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from d9d_core.schedule import Action, Backward, Forward, InputBackward, MicrobatchAction, Overlap, WeightBackward
from d9d_engine.figures import figure_svg, new_figure

from d9d_pipeline.simulator.result import Simulation

#: Type -> name in the legend, and the colours of the first and the last stage of a rank.
_COLOURS: dict[type[Action], tuple[str, str, str]] = {
    Forward: ("forward", "#a9cdf4", "#2f6fb7"),
    Backward: ("backward", "#b4e0b0", "#3b8f49"),
    InputBackward: ("input gradients", "#9fe0d8", "#1f857d"),
    WeightBackward: ("weight gradients", "#fbd9a0", "#c77d1a"),
}
_IDLE = "#f1f1f1"
#: Inches: height of a row, height above and below all rows together, least and largest width, width of a digit.
_ROW, _AROUND, _WIDTHS, _DIGIT = 0.3, 1.9, (8.0, 24.0), 0.085
#: Inches of the shortest computation's width, if the picture can be wide enough; fraction of a row's height that is
#: filled.
_SHORTEST, _FILLED = 0.18, 0.86
#: Largest number of boxes with microbatch numbers; with more boxes no numbers are drawn, to keep the file small.
_NUMBERS = 3000


class Box(NamedTuple):
    """Rectangle of one computation, or of one half of an overlapped pair: x in units of time, y in rows."""

    action: MicrobatchAction
    begin: float
    length: float
    bottom: float
    height: float


def draw(simulation: Simulation, title: str) -> str:
    """Draw a picture of a simulated step: its timeline, as SVG.

    Args:
        simulation: simulated step of all ranks.
        title: title of the picture.

    Raises:
        PluginError: matplotlib is not installed (the extra ``plots`` of d9d-engine).
    """
    makespan = simulation.makespan or 1.0
    boxes = [list(_boxes(simulation, rank)) for rank in range(simulation.ranks)]
    shortest = min((box.length for row in boxes for box in row if box.length > 0), default=makespan)
    width = min(max(makespan / shortest * _SHORTEST, _WIDTHS[0]), _WIDTHS[1])
    figure = new_figure(width, simulation.ranks * _ROW + _AROUND)
    axis = figure.subplots()
    stages = [simulation.stages(rank) for rank in range(simulation.ranks)]
    places = {stage: place for mine in stages for place, stage in enumerate(mine)}
    depth = max(map(len, stages), default=1)
    for rank, row in enumerate(boxes):
        axis.broken_barh([(0, makespan)], (rank - _FILLED / 2, _FILLED), facecolors=_IDLE, gid=f"rank{rank}-idle")
        _fill(axis, row, places, depth, f"rank{rank}")
    if sum(map(len, boxes)) <= _NUMBERS:
        _number([box for row in boxes for box in row], axis, places, depth, width / makespan)
    axis.set_xlim(0, makespan)
    axis.set_ylim(simulation.ranks - 0.5, -0.5)
    axis.set_yticks(range(simulation.ranks), [f"rank {rank}" for rank in range(simulation.ranks)])
    axis.tick_params(axis="y", length=0)
    axis.spines[["left", "right", "top"]].set_visible(False)
    figure.suptitle(title)
    axis.set_title(_facts(simulation), fontsize="small")
    looks = _looks({type(box.action) for row in boxes for box in row}, depth)
    figure.legend(
        handles=[axis.barh(0, 0, color=colour)[0] for colour in looks.values()],
        labels=list(looks),
        loc="outside lower center",
        ncols=5,
        fontsize="small",
        frameon=False,
        title=_remarks(simulation, depth) or None,
        title_fontsize="small",
    )
    return figure_svg(figure)


def _facts(simulation: Simulation) -> str:
    return (
        f"bubble {simulation.bubble:.1%}, between the first and last action of the idlest rank "
        f"{simulation.inner_bubble:.1%}; at most {max(simulation.peak_live, default=0):.4g} microbatches held by a rank"
    )


def _remarks(simulation: Simulation, depth: int) -> str:
    pairs = any(isinstance(span.action, Overlap) for rank in range(simulation.ranks) for span in simulation.spans(rank))
    shades = "pale to dark: first to last stage of a rank" if depth > 1 else ""
    return "; ".join(filter(None, (shades, "stacked: at the same time" if pairs else "")))


def _halves(action: Action) -> Sequence[MicrobatchAction]:
    if isinstance(action, Overlap):
        return (action.forward, action.backward)
    assert isinstance(action, MicrobatchAction)
    return (action,)


def _boxes(simulation: Simulation, rank: int) -> Iterator[Box]:
    for span in simulation.spans(rank):
        halves = _halves(span.action)
        height = _FILLED / len(halves)
        for number, half in enumerate(halves):
            yield Box(half, span.begin, span.end - span.begin, rank - _FILLED / 2 + number * height, height)


def _fill(axis: Any, row: Sequence[Box], places: Mapping[int, int], depth: int, gid: str) -> None:
    """Draw the boxes of a rank; equal-looking boxes are one element, so that files of long steps stay small."""
    alike: dict[tuple[type[MicrobatchAction], int, float, float], list[tuple[float, float]]] = {}
    for box in row:
        key = type(box.action), places[box.action.stage], box.bottom, box.height
        alike.setdefault(key, []).append((box.begin, box.length))
    for (kind, place, bottom, height), spans in alike.items():
        axis.broken_barh(
            spans,
            (bottom, height),
            facecolors=_colour(kind, place, depth),
            edgecolors="white",
            linewidths=0.6,
            gid=f"{gid}-{kind.__name__}-{place}",
        )


def _number(boxes: Sequence[Box], axis: Any, places: Mapping[int, int], depth: int, inches: float) -> None:
    """Write microbatch numbers into the boxes that are wide enough; ``inches`` is the width of one unit of time."""
    for box in boxes:
        text = str(box.action.microbatch)
        if len(text) * _DIGIT <= box.length * inches:
            dark = depth > 1 and places[box.action.stage] > (depth - 1) / 2
            axis.text(
                box.begin + box.length / 2,
                box.bottom + box.height / 2,
                text,
                ha="center",
                va="center_baseline",
                fontsize=7 if box.height == _FILLED else 5,
                color="white" if dark else "#222222",
            )


def _looks(kinds: set[type[MicrobatchAction]], depth: int) -> dict[str, str]:
    """Legend of the picture: name -> colour, for each kind of computation that occurs and for idle time."""
    middle = (depth - 1) // 2
    return {
        **{name: _colour(kind, middle, depth) for kind, (name, _, _) in _COLOURS.items() if kind in kinds},
        "idle": _IDLE,
    }


def _colour(kind: type[Action], place: int, depth: int) -> str:
    _, pale, dark = _COLOURS[kind]
    pairs = [(int(pale[at : at + 2], 16), int(dark[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * place / max(1, depth - 1)):02x}" for a, b in pairs)

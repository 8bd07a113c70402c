"""Timeline of a simulated step as one SVG file that needs nothing else.

Ranks are rows, time runs to the right, numbers are microbatches. The first stage of a rank is pale, its last one dark.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from d9d_core.extend import Action, Backward, Forward, InputBackward, MicrobatchAction, Overlap, WeightBackward

from d9d_pipeline.simulator.result import Simulation, Span

#: Type -> its letter in class names, what the legend says, and the colours of the first and the last stage of a rank.
_COLOURS: dict[type[Action], tuple[str, str, str, str]] = {
    Forward: ("f", "forward", "#a9cdf4", "#2f6fb7"),
    Backward: ("b", "backward", "#b4e0b0", "#3b8f49"),
    InputBackward: ("i", "gradients of inputs", "#9fe0d8", "#1f857d"),
    WeightBackward: ("w", "gradients of weights", "#fbd9a0", "#c77d1a"),
}
_ROW, _GAP, _LEFT, _TOP, _MARGIN = 26, 4, 64, 62, 16
_FONT = "font-family:'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif"
#: Widest drawing, and how wide the shortest action should be if that allows it, in pixels.
_WIDEST, _BOX = 2400, 17.0


def draw(simulation: Simulation, title: str) -> str:
    """Draw a picture of a step: its timeline, as SVG.

    Args:
        simulation: simulated step of all ranks.
        title: title of the picture.
    """
    makespan = simulation.makespan or 1.0
    rows = [list(simulation.spans(rank)) for rank in range(simulation.ranks)]
    shortest = min(
        (span.end - span.begin for spans in rows for span in spans if span.end > span.begin), default=makespan
    )
    scale = max(min(_BOX / shortest, _WIDEST / makespan), 720 / makespan)
    width = _LEFT + makespan * scale + _MARGIN
    bottom = _TOP + simulation.ranks * (_ROW + _GAP)
    stages = [simulation.stages(rank) for rank in range(simulation.ranks)]
    depth = max(map(len, stages), default=1)
    places = {stage: place for mine in stages for place, stage in enumerate(mine)}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{bottom + 64}" '
        f'viewBox="0 0 {width:.0f} {bottom + 64}">',
        f"<title>{escape(title)}</title>",
        f"<style>{''.join(_styles(depth))}</style>",
        f'<rect class="paper" width="{width:.0f}" height="{bottom + 64}"/>',
        f'<text class="title" x="{_MARGIN}" y="26">{escape(title)}</text>',
        f'<text class="facts" x="{_MARGIN}" y="46">{escape(_facts(simulation))}</text>',
    ]
    for rank, spans in enumerate(rows):
        y = _TOP + rank * (_ROW + _GAP)
        parts.append(f'<text class="rank" x="{_LEFT - 8}" y="{y + _ROW / 2 + 4}">rank {rank}</text>')
        parts.append(f'<rect class="idle" x="{_LEFT}" y="{y}" width="{makespan * scale:.2f}" height="{_ROW}"/>')
        for span in spans:
            parts += _box(span, scale, y, places)
    parts += _axis(makespan, scale, bottom)
    parts += _legend(
        {type(part) for spans in rows for span in spans for part in _halves(span.action)}, depth, bottom + 48
    )
    if any(isinstance(span.action, Overlap) for spans in rows for span in spans):
        end = f'x="{width - _MARGIN:.0f}" y="{bottom + 48}" text-anchor="end"'
        parts.append(f'<text class="key" {end}>stacked: at the same time</text>')
    return "\n".join([*parts, "</svg>", ""])


def _facts(simulation: Simulation) -> str:
    return (
        f"bubble {simulation.bubble:.1%}, of the idlest rank between its first and last action "
        f"{simulation.inner_bubble:.1%}; at most {max(simulation.peak_live, default=0):.4g} microbatches held by a rank"
    )


def _styles(depth: int) -> Iterator[str]:
    yield f"text{{{_FONT};font-size:11px;fill:#222}}.paper{{fill:#fff}}.idle{{fill:#f1f1f1}}"
    yield ".title{font-size:16px;font-weight:600}.facts{fill:#555;font-size:12px}.rank{text-anchor:end;fill:#444}"
    yield ".n{text-anchor:middle;dominant-baseline:central}.s{font-size:9px}.d{fill:#fff}"
    yield ".axis{stroke:#999;stroke-width:1}.tick{text-anchor:middle;fill:#666;font-size:10px}"
    yield ".box{stroke:#fff;stroke-width:0.8}.key{fill:#444}"
    for letter, _, pale, dark in _COLOURS.values():
        for place in range(depth):
            yield f".{letter}{place}{{fill:{_mix(pale, dark, place / max(1, depth - 1))}}}"


def _mix(pale: str, dark: str, share: float) -> str:
    pairs = [(int(pale[at : at + 2], 16), int(dark[at : at + 2], 16)) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _halves(action: Action) -> Sequence[MicrobatchAction]:
    if isinstance(action, Overlap):
        return (action.forward, action.backward)
    assert isinstance(action, MicrobatchAction)
    return (action,)


def _box(span: Span, scale: float, y: float, places: dict[int, int]) -> Iterator[str]:
    halves = _halves(span.action)
    x, width, height = _LEFT + span.begin * scale, (span.end - span.begin) * scale, _ROW / len(halves)
    depth = max(places.values(), default=0)
    for row, half in enumerate(halves):
        letter, place = _COLOURS[type(half)][0], places[half.stage]
        top, number = y + row * height, str(half.microbatch)
        tip = f"<title>{escape(str(span.action))}: {span.begin:.6g} to {span.end:.6g}</title>"
        area = f'x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"'
        yield f'<rect class="box {letter}{place}" {area}>{tip}</rect>'
        size = 9 if len(halves) > 1 else 11
        if len(number) * size * 0.58 <= width - 1:
            looks = "n" + (" s" if len(halves) > 1 else "") + (" d" if depth and place > depth / 2 else "")
            yield f'<text class="{looks}" x="{x + width / 2:.2f}" y="{top + height / 2:.2f}">{number}</text>'


def _axis(makespan: float, scale: float, y: float) -> Iterator[str]:
    end = _LEFT + makespan * scale
    yield f'<line class="axis" x1="{_LEFT}" y1="{y + 4}" x2="{end:.2f}" y2="{y + 4}"/>'
    step = _round_step(90 / scale)
    for tick in range(int(makespan / step + 1e-9) + 1):
        x = _LEFT + tick * step * scale
        yield f'<line class="axis" x1="{x:.2f}" y1="{y + 4}" x2="{x:.2f}" y2="{y + 9}"/>'
        yield f'<text class="tick" x="{x:.2f}" y="{y + 22}">{tick * step:.6g}</text>'


def _round_step(least: float) -> float:
    """Smallest 1, 2 or 5 times a power of ten that is not below ``least``."""
    power = 10.0 ** (len(f"{int(least)}") - 1) if least >= 1 else 10.0 ** -len(str(int(1 / least)))
    return next(factor * power for factor in (1, 2, 5, 10, 20) if factor * power >= least)


def _legend(kinds: set[type[MicrobatchAction]], depth: int, y: float) -> Iterator[str]:
    x = float(_LEFT)
    for kind, (letter, name, _, _) in _COLOURS.items():
        if kind in kinds:
            for place in range(depth):
                yield f'<rect class="{letter}{place}" x="{x + place * 14:.0f}" y="{y - 11}" width="14" height="14"/>'
            x += depth * 14 + 6
            yield f'<text class="key" x="{x:.0f}" y="{y}">{name}</text>'
            x += len(name) * 6.2 + 22
    yield f'<rect class="idle" x="{x:.0f}" y="{y - 11}" width="14" height="14"/>'
    yield f'<text class="key" x="{x + 20:.0f}" y="{y}">idle</text>'
    if depth > 1:
        yield f'<text class="key" x="{x + 60:.0f}" y="{y}">pale to dark: first to last stage of a rank</text>'

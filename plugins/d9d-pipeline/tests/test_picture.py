"""Timelines are complete, to scale and the same each time."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from d9d_core.program.text import parse_programs
from d9d_core.schedule import Backward, Forward
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.one_forward_one_backward import one_forward_one_backward
from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v
from d9d_pipeline.simulator import picture
from d9d_pipeline.simulator.costs import Costs
from d9d_pipeline.simulator.picture import Box, draw
from d9d_pipeline.simulator.run import simulate

pytest.importorskip("matplotlib", reason="the extra 'plots' of d9d-engine")

SVG = "{http://www.w3.org/2000/svg}"


def rows(picture: str) -> dict[str, list[list[float]]]:
    """Horizontal extents of the boxes, by rank, kind and place of the stage."""
    found = {}
    for group in ET.fromstring(picture).iter(f"{SVG}g"):
        if re.match(r"rank\d+-", name := group.get("id", "")):
            paths = [path.get("d", "") for path in group.iter(f"{SVG}path") if path.get("d")]
            found[name] = [[float(x) for x in re.findall(r"[ML] ([\d.]+) ", path)] for path in paths]
    return found


def spans(picture: str, name: str) -> list[tuple[float, float]]:
    return [(min(xs), max(xs)) for xs in rows(picture)[name]]


def texts(picture: str) -> list[str]:
    return [unescape(text) for text in re.findall(r"<!-- (.*?) -->", picture)]


@pytest.mark.thorough
def test_every_computation_is_a_box_with_its_microbatch() -> None:
    picture = draw(simulate(one_forward_one_backward(4, 8)), "1f1b")
    counts = {name: len(boxes) for name, boxes in rows(picture).items() if not name.endswith("idle")}
    assert counts == {f"rank{rank}-{kind}-0": 8 for rank in range(4) for kind in ("Forward", "Backward")}
    numbers = Counter(texts(picture))
    assert all(numbers[str(microbatch)] >= 8 for microbatch in range(8))
    assert [text for text in texts(picture) if text.startswith("rank")] == [f"rank {rank}" for rank in range(4)]


def test_a_step_that_takes_no_time_is_drawn() -> None:
    step = simulate(one_forward_one_backward(2, 2), Costs(forward=0, backward=0, weight=0))
    assert len(rows(draw(step, "nothing"))["rank0-Forward-0"]) == 2


def test_boxes_lie_where_time_says() -> None:
    step = simulate(one_forward_one_backward(2, 2), Costs(transfer=0.5))
    picture = draw(step, "1f1b")
    ((left, right),) = spans(picture, "rank0-idle")
    scale = (right - left) / step.makespan
    for rank in range(2):
        drawn = sorted(spans(picture, f"rank{rank}-Forward-0") + spans(picture, f"rank{rank}-Backward-0"))
        said = [(left + span.begin * scale, left + span.end * scale) for span in step.spans(rank)]
        assert [x for pair in drawn for x in pair] == pytest.approx([x for pair in said for x in pair], abs=0.01)


def test_halves_of_an_overlapped_pair_share_their_time() -> None:
    picture = draw(simulate(parse_programs("F0.0 F0.1+B0.0 B0.1 R0")), "pair")
    names = [name for name in rows(picture) if not name.endswith("idle")]
    assert Counter(names) == {"rank0-Forward-0": 1, "rank0-Backward-0": 1}
    assert "stacked: at the same time" in texts(picture)


def test_stages_of_a_rank_have_shades_and_the_legend_names_what_is_there() -> None:
    picture = draw(simulate(zero_bubble_v(4, 8)), "zbv")
    kinds = {name.partition("-")[2] for name in rows(picture)}
    assert kinds == {
        "idle",
        *(f"{kind}-{n}" for kind in ("Forward", "InputBackward", "WeightBackward") for n in (0, 1)),
    }
    shown = texts(picture)
    assert {"forward", "input gradients", "weight gradients", "idle"} <= set(shown)
    assert "backward" not in shown
    assert "pale to dark: first to last stage of a rank" in shown


def test_ranks_may_have_different_numbers_of_stages() -> None:
    programs = parse_programs("F0.0 S>0.0 R<0.0 B0.0 R0\nR>1.0 F1.0 F2.0 B2.0 R2 B1.0 S<1.0 R1")
    names = rows(draw(simulate(programs), "uneven"))
    assert {"rank0-Forward-0", "rank1-Forward-0", "rank1-Forward-1"} <= names.keys()


def test_it_says_what_it_shows_and_how_good_it_is() -> None:
    step = simulate(dual_pipe_v(2, 4))
    picture = draw(step, "dual <pipe> & co")
    assert ET.fromstring(picture).tag == f"{SVG}svg"
    assert "dual <pipe> & co" in texts(picture)
    assert f"bubble {step.bubble:.1%}, between the first and last action" in " ".join(texts(picture))


def test_the_same_step_is_the_same_picture() -> None:
    first, second = (draw(simulate(zero_bubble_v(2, 4)), "zbv") for _ in range(2))
    assert first == second
    assert "<script" not in first


def test_hundreds_of_microbatches_fit_into_a_picture() -> None:
    picture = draw(simulate(one_forward_one_backward(4, 300)), "long")
    root = ET.fromstring(picture)
    assert float(root.get("width", "").removesuffix("pt")) < 2000
    assert len(rows(picture)["rank0-Forward-0"]) == 300
    assert len(picture) < 2**20


def size(picture: str) -> tuple[float, float]:
    """Width and height in inches."""
    root = ET.fromstring(picture)
    return tuple(float(root.get(side, "").removesuffix("pt")) / 72 for side in ("width", "height"))  # type: ignore[return-value]


@pytest.mark.parametrize(("backward", "width"), [(2.0, 8.0), (99.0, 18.0), (199.0, 24.0)])
def test_the_shortest_computation_is_018_inches_wide_between_8_and_24_inches(backward: float, width: float) -> None:
    step = simulate(parse_programs("F0.0 B0.0 R0"), Costs(forward=1.0, backward=backward, weight=1.0))
    assert size(draw(step, "wide")) == (pytest.approx(width), pytest.approx(0.3 + 1.9))


def test_each_rank_makes_a_picture_higher() -> None:
    assert size(draw(simulate(one_forward_one_backward(3, 3)), "high"))[1] == pytest.approx(3 * 0.3 + 1.9)


class Axis:
    """Stand-in of an axis of matplotlib that notes its boxes and texts."""

    def __init__(self) -> None:
        self.boxes: list[Any] = []
        self.texts: list[Any] = []

    def broken_barh(self, spans: Any, rows: Any, *, facecolors: str, gid: str, **_: Any) -> None:
        self.boxes.append((spans, rows, facecolors, gid))

    def text(self, x: float, y: float, text: str, *, fontsize: int, color: str, **_: Any) -> None:
        self.texts.append((x, y, text, fontsize, color))


def test_equal_looking_boxes_of_a_rank_are_one_element() -> None:
    axis = Axis()
    boxes = [
        Box(Forward(1, 0), 0.0, 1.0, 0.5, 0.25), Box(Forward(3, 0), 1.0, 1.0, 0.5, 0.25),
        Box(Forward(1, 1), 2.0, 1.5, 0.5, 0.25), Box(Backward(1, 0), 4.0, 2.0, 0.75, 0.25),
    ]  # fmt: skip
    picture._fill(axis, boxes, {1: 0, 3: 1}, 2, "rank1")
    assert axis.boxes == [
        ([(0.0, 1.0), (2.0, 1.5)], (0.5, 0.25), "#a9cdf4", "rank1-Forward-0"),
        ([(1.0, 1.0)], (0.5, 0.25), "#2f6fb7", "rank1-Forward-1"),
        ([(4.0, 2.0)], (0.75, 0.25), "#b4e0b0", "rank1-Backward-0"),
    ]


def test_numbers_are_written_where_they_fit_and_are_light_on_dark_boxes() -> None:
    axis = Axis()
    whole = 0.86
    boxes = [
        Box(Forward(0, 7), 0.0, 1.0, 0.0, whole), Box(Forward(1, 12), 1.0, 1.0, 0.0, whole / 2),
        Box(Forward(2, 12), 2.0, 2.0, 1.0, whole / 2),
    ]  # fmt: skip
    picture._number(boxes, axis, {0: 0, 1: 1, 2: 2}, 3, 0.085)
    assert axis.texts == [(0.5, whole / 2, "7", 7, "#222222"), (3.0, 1.0 + whole / 4, "12", 5, "white")]
    axis.texts.clear()
    picture._number(boxes[:1], axis, {0: 0}, 1, 0.0849)  # too narrow for a digit
    assert axis.texts == []
    picture._number([boxes[1]], axis, {1: 1}, 3, 1.0)  # the middle of three stages is pale
    assert [text[4] for text in axis.texts] == ["#222222"]


def test_colours_go_from_pale_to_dark_over_the_stages_of_a_rank() -> None:
    assert picture._colour(Forward, 0, 1) == "#a9cdf4"
    # A third of the way from a9 (169) to 2f (47): 128.3; from cd (205) to 6f (111): 173.7; from f4 (244) to b7 (183).
    assert picture._colour(Forward, 1, 4) == "#80aee0"
    assert picture._colour(Forward, 3, 4) == "#2f6fb7"
    assert picture._looks({Backward, Forward}, 1) == {
        "forward": "#a9cdf4", "backward": "#b4e0b0", "idle": "#f1f1f1",
    }  # fmt: skip
    assert picture._looks({Forward}, 4)["forward"] == "#80aee0"


def test_a_pair_is_drawn_as_two_halves_of_a_row() -> None:
    step = simulate(parse_programs("F0.0 F0.1+B0.0 B0.1 R0"))
    assert list(picture._boxes(step, 0)) == [
        Box(Forward(0, 0), 0.0, 1.0, -0.43, 0.86),
        Box(Forward(0, 1), 1.0, 3.0, -0.43, 0.43),
        Box(Backward(0, 0), 1.0, 3.0, 0.0, 0.43),
        Box(Backward(0, 1), 4.0, 2.0, -0.43, 0.86),
    ]
    assert picture._remarks(step, 1) == "stacked: at the same time"
    assert picture._remarks(step, 2) == "pale to dark: first to last stage of a rank; stacked: at the same time"
    assert picture._facts(step) == (
        "bubble 0.0%, between the first and last action of the idlest rank 0.0%; at most 2 microbatches held by a rank"
    )


def test_more_boxes_than_3000_have_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    step = simulate(one_forward_one_backward(1, 2))  # four boxes
    numbered: list[int] = []
    monkeypatch.setattr(picture, "_number", lambda boxes, *_: numbered.append(len(boxes)))
    for most in (4, 3):
        monkeypatch.setattr(picture, "_NUMBERS", most)
        draw(step, "few")
    assert numbered == [4]

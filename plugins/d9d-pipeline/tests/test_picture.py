"""Timelines are well-formed, complete and stand alone."""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree as ET

import pytest
from d9d_core.extend import parse_programs
from d9d_pipeline.schedule.dual_pipe_v import dual_pipe_v
from d9d_pipeline.schedule.one_forward_one_backward import one_forward_one_backward
from d9d_pipeline.schedule.zero_bubble_v import zero_bubble_v
from d9d_pipeline.simulator.costs import Costs
from d9d_pipeline.simulator.picture import draw
from d9d_pipeline.simulator.run import simulate

SVG = "{http://www.w3.org/2000/svg}"


def elements(picture: str, tag: str) -> list[ET.Element]:
    return list(ET.fromstring(picture).iter(f"{SVG}{tag}"))


def boxes(picture: str) -> list[ET.Element]:
    return [rect for rect in elements(picture, "rect") if rect.get("class", "").startswith("box ")]


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in elements(picture, "text")]


def test_every_computation_is_a_box_with_its_microbatch() -> None:
    picture = draw(simulate(one_forward_one_backward(4, 8)), "1f1b")
    kinds = Counter(box.get("class", "").split()[1] for box in boxes(picture))
    assert kinds == {"f0": 32, "b0": 32}
    numbers = Counter(element.text for element in elements(picture, "text") if element.get("class") == "n")
    assert numbers == {str(microbatch): 8 for microbatch in range(8)}
    assert [text for text in texts(picture) if text.startswith("rank")] == [f"rank {rank}" for rank in range(4)]


def test_a_step_that_takes_no_time_is_drawn() -> None:
    step = simulate(one_forward_one_backward(2, 2), Costs(forward=0, backward=0, weight=0))
    assert len(boxes(draw(step, "nothing"))) == 8


def test_boxes_lie_where_time_says() -> None:
    step = simulate(one_forward_one_backward(2, 2), Costs(transfer=0.5))
    picture = draw(step, "1f1b")
    found = [(float(box.get("x", 0)), float(box.get("width", 0))) for box in boxes(picture)]
    spans = [span for rank in range(2) for span in step.spans(rank)]
    scale = found[0][1] / (spans[0].end - spans[0].begin)
    for (x, width), span in zip(found, spans, strict=True):
        assert width == pytest.approx((span.end - span.begin) * scale, abs=0.02)
        assert x == pytest.approx(found[0][0] + span.begin * scale, abs=0.02)


def test_halves_of_an_overlapped_pair_share_their_time() -> None:
    picture = draw(simulate(parse_programs("F0.0 F0.1+B0.0 B0.1 R0")), "pair")
    _, forward, backward, _ = boxes(picture)
    assert forward.get("x") == backward.get("x")
    assert forward.get("width") == backward.get("width")
    assert float(forward.get("y", 0)) + float(forward.get("height", 0)) == float(backward.get("y", 0))
    assert "stacked: at the same time" in texts(picture)


def test_stages_of_a_rank_have_shades_and_the_legend_names_what_is_there() -> None:
    picture = draw(simulate(zero_bubble_v(4, 8)), "zbv")
    assert {box.get("class", "").split()[1] for box in boxes(picture)} == {"f0", "f1", "i0", "i1", "w0", "w1"}
    shown = texts(picture)
    assert {"forward", "gradients of inputs", "gradients of weights", "idle"} <= set(shown)
    assert "backward" not in shown
    assert "pale to dark: first to last stage of a rank" in shown


def test_every_box_has_a_colour_where_ranks_have_different_numbers_of_stages() -> None:
    programs = parse_programs("F0.0 S>0.0 R<0.0 B0.0 R0\nR>1.0 F1.0 F2.0 B2.0 R2 B1.0 S<1.0 R1")
    picture = draw(simulate(programs), "uneven")
    (styles,) = elements(picture, "style")
    for box in boxes(picture):
        assert f".{box.get('class', '').split()[1]}{{fill:#" in (styles.text or "")


def test_it_says_what_it_shows_and_how_good_it_is() -> None:
    step = simulate(dual_pipe_v(2, 4))
    picture = draw(step, "dual <pipe> & co")
    assert "dual <pipe> & co" in texts(picture)
    assert f"bubble {step.bubble:.1%}, of the idlest rank" in " ".join(texts(picture))


def test_it_needs_nothing_else() -> None:
    picture = draw(simulate(zero_bubble_v(2, 4)), "zbv")
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in picture


def test_hundreds_of_microbatches_fit_into_a_picture() -> None:
    picture = draw(simulate(one_forward_one_backward(4, 300)), "long")
    (root,) = elements(picture, "svg")
    assert float(root.get("width", 0)) < 2600


@pytest.mark.parametrize("unit", [1e-4, 1.0, 1e4])
def test_the_axis_is_readable_in_any_unit(unit: float) -> None:
    costs = Costs(forward=unit, backward=2 * unit, weight=unit)
    picture = draw(simulate(one_forward_one_backward(4, 8), costs), "1f1b")
    ticks = [float(element.text or 0) for element in elements(picture, "text") if element.get("class") == "tick"]
    assert 3 <= len(ticks) <= 20
    assert ticks[0] == 0
    assert ticks[-1] <= 33.0001 * unit

"""Plots of a learning rate, compared with lines drawn by hand."""

from __future__ import annotations

import re

import pytest
from d9d_optim.cli import picture
from d9d_optim.cli.picture import svg_plot, text_plot


def test_columns_of_text_are_as_high_as_the_highest_rate_of_their_steps() -> None:
    # Of two lines of eight parts: a half is the lower line, a quarter half of it, 0.8 is 13 of 16.
    assert text_plot([0.0, 0.5, 0.25, 0.2, 0.1, 0.8, 1.0, 1.0], width=4, height=2).splitlines() == [
        "        1 │  ▅█",
        "      0.5 │█▄██",
        "        0 └────",
        "           0  7",
    ]  # fmt: skip


def test_few_steps_have_a_column_each_and_a_rate_of_zero_is_drawn() -> None:
    assert text_plot([2.0, 1.0], width=72, height=3).splitlines() == [
        "        2 │█",
        "     1.33 │█▄",
        "          │██",
        "        0 └──",
        "           0 1",
    ]  # fmt: skip
    assert text_plot([0.0], height=1).splitlines() == ["        1 │", "        0 └─", "           0 0"]


def test_a_text_has_72_columns_and_12_lines_and_numbers_of_thousands() -> None:
    lines = text_plot([1.0] * 2001).splitlines()
    assert len(lines) == 14
    assert lines[0] == f"        1 │{'█' * 72}"
    assert lines[6] == f"      0.5 │{'█' * 72}"
    assert [line[:9].strip() for line in lines[1:6]] == [""] * 5
    assert lines[-1] == f"           0{'2,000':>71}"


def points(svg: str) -> list[tuple[float, float]]:
    (found,) = re.findall(r'<polyline points="([^"]*)"', svg)
    return [tuple(map(float, pair.split(","))) for pair in found.split()]  # type: ignore[misc]


def test_a_picture_has_a_point_for_each_step_between_its_margins() -> None:
    svg = svg_plot([0.0, 4.0, 1.0], "a <title>", width=300, height=190)
    # 200 x 100 inside margins of 80 and 20, 40 and 50.
    assert points(svg) == [(80.0, 140.0), (180.0, 40.0), (280.0, 115.0)]
    assert 'viewBox="0 0 300 190"' in svg
    assert "a &lt;title&gt;" in svg
    grid = re.findall(r'<path d="M80 ([\d.]+)H280"', svg)
    assert grid == ["140.0", "115.0", "90.0", "65.0", "40.0"]
    labels = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="(?:end|middle)">([^<]*)<', svg)
    assert labels == [
        ("72", "144.0", "0"), ("80.0", "158", "0"),
        ("72", "119.0", "1"), ("80.0", "158", "0"),
        ("72", "94.0", "2"), ("180.0", "158", "1"),
        ("72", "69.0", "3"), ("280.0", "158", "2"),
        ("72", "44.0", "4"), ("280.0", "158", "2"),
        ("180", "180", "step"),
    ]  # fmt: skip
    assert 'transform="rotate(-90 16 90)">learning rate<' in svg
    assert re.findall(r'<rect width="(\d+)" height="(\d+)"', svg) == [("300", "190")]


def test_one_step_and_rates_of_zero_are_drawn() -> None:
    assert points(svg_plot([3.0], "one")) == [(80.0, 40.0)]
    assert points(svg_plot([0.0, 0.0], "none")) == [(80.0, 350.0), (780.0, 350.0)]


@pytest.mark.parametrize(("steps", "drawn"), [(5, [0, 1, 2, 3, 4]), (8, [0, 2, 4, 6, 7]), (9, [0, 2, 4, 6, 8])])
def test_a_long_run_has_a_point_for_several_steps_and_its_last(
    monkeypatch: pytest.MonkeyPatch, steps: int, drawn: list[int]
) -> None:
    monkeypatch.setattr(picture, "_POINTS", 4)
    found = points(svg_plot([float(step) for step in range(steps)], "long", width=100 + 10 * (steps - 1)))
    assert [round((x - 80) / 10) for x, _ in found] == drawn

"""Pictures of loss curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, TypedDict

from d9d_weights.files.atomic import write_text

from d9d_engine.figures import figure_svg, new_figure


class _Style(TypedDict, total=False):
    color: str
    linewidth: float
    marker: str
    markersize: float


def draw_loss(lines: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw training and evaluation loss over steps as SVG, with the learning rate in the background.

    Args:
        lines: logged values, each with ``step``; lines without a loss are ignored.
        path: path of the picture.
        title: title above the picture.

    Raises:
        PluginError: matplotlib is not installed.
    """
    figure = new_figure(8, 4.5)
    loss_axis = figure.subplots()
    rate_axis = loss_axis.twinx()
    for series, axis, style in (
        ("lr", rate_axis, _Style(color="0.75", linewidth=1)),
        ("loss", loss_axis, _Style(color="tab:blue", linewidth=1.5)),
        ("eval/loss", loss_axis, _Style(color="tab:orange", marker="o", markersize=4)),
    ):
        points = [(line["step"], line[series]) for line in lines if line.get(series) is not None]
        if points:
            axis.plot(*zip(*points, strict=True), label=series, **style)
    loss_axis.set_xlabel("step")
    loss_axis.set_ylabel("loss")
    rate_axis.set_ylabel("learning rate", color="0.5")
    loss_axis.set_title(title)
    loss_axis.grid(alpha=0.3)
    loss_axis.set_zorder(rate_axis.get_zorder() + 1)
    loss_axis.patch.set_visible(False)
    if loss_axis.get_legend_handles_labels()[0]:
        loss_axis.legend()
    write_text(path, figure_svg(figure))


def draw_overlay(curves: Mapping[str, Sequence[tuple[int, float]]], path: Path, series: str) -> None:
    """Draw the curves of several runs in one picture, as SVG or as an HTML page with the SVG.

    Args:
        curves: name of a run -> points (step, value).
        path: path of the picture; its suffix selects the format.
        series: name of the values.

    Raises:
        PluginError: matplotlib is not installed.
    """
    figure = new_figure(8, 4.5)
    axis = figure.subplots()
    for name, points in curves.items():
        if points:
            axis.plot(*zip(*points, strict=True), label=name, linewidth=1.2)
    axis.set_xlabel("step")
    axis.set_ylabel(series)
    axis.grid(alpha=0.3)
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize="small")
    text = figure_svg(figure)
    if path.suffix == ".html":
        drawing = text[text.index("<svg") :]
        title = escape(f"{series} of {len(curves)} runs")
        text = f'<!doctype html>\n<html><head><meta charset="utf-8"><title>{title}</title></head>\n'
        text += f"<body>\n{drawing}</body></html>\n"
    write_text(path, text)

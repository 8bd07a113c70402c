"""Pictures of loss curves: which points are drawn, and how. The drawing library is a stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from d9d_engine.trackers import picture
from d9d_engine.trackers.picture import draw_loss, draw_overlay


class Axis:
    """Records its calls."""

    def __init__(self, order: float = 0.0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.patch = SimpleNamespace(set_visible=lambda shown: self.calls.append(("patch", shown)))
        self.order = order
        self.other: Axis
        self.lines: list[tuple[Any, Any, dict[str, Any]]] = []

    def twinx(self) -> Axis:
        self.other = Axis(3.0)
        return self.other

    def plot(self, x: Any, y: Any, **style: Any) -> None:
        self.lines.append((x, y, style))

    def get_zorder(self) -> float:
        return self.order

    def get_legend_handles_labels(self) -> tuple[list[Any], list[Any]]:
        return self.lines, []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **options: self.calls.append((name, *args, *options.items()))


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Any:
    found = SimpleNamespace(axis=Axis(), size=None, text=None, path=None)

    def new_figure(width: float, height: float) -> Any:
        found.size = (width, height)
        return SimpleNamespace(subplots=lambda: found.axis)

    monkeypatch.setattr(picture, "new_figure", new_figure)
    monkeypatch.setattr(picture, "figure_svg", lambda _figure: "<?xml?>\n<svg>the drawing</svg>\n")
    monkeypatch.setattr(
        picture, "write_text", lambda path, text: setattr(found, "path", path) or setattr(found, "text", text)
    )
    return found


LINES: list[dict[str, Any]] = [
    {"step": 1, "loss": 4.0, "lr": 0.1},
    {"step": 2, "lr": 0.2},
    {"step": 3, "loss": 3.0, "eval/loss": 3.5, "lr": None},
]


def test_losses_are_drawn_over_steps_above_the_learning_rate(drawn: Any) -> None:
    draw_loss(LINES, Path("loss.svg"), "a run")
    axis = drawn.axis
    assert axis.lines == [
        ((1, 3), (4.0, 3.0), {"label": "loss", "color": "tab:blue", "linewidth": 1.5}),
        ((3,), (3.5,), {"label": "eval/loss", "color": "tab:orange", "marker": "o", "markersize": 4}),
    ]
    assert axis.other.lines == [((1, 2), (0.1, 0.2), {"label": "lr", "color": "0.75", "linewidth": 1})]
    assert axis.calls == [
        ("set_xlabel", "step"),
        ("set_ylabel", "loss"),
        ("set_title", "a run"),
        ("grid", ("alpha", 0.3)),
        ("set_zorder", 4.0),
        ("patch", False),
        ("legend",),
    ]
    assert axis.other.calls == [("set_ylabel", "learning rate", ("color", "0.5"))]
    assert (drawn.size, drawn.path) == ((8, 4.5), Path("loss.svg"))
    assert drawn.text.startswith("<?xml?>")


def test_a_picture_without_losses_has_no_legend(drawn: Any) -> None:
    draw_loss([{"step": 1, "lr": 0.1}], Path("loss.svg"), "a run")
    assert drawn.axis.lines == []
    assert ("legend",) not in drawn.axis.calls


def test_curves_of_several_runs_are_one_picture_or_page(drawn: Any) -> None:
    curves = {"a": [(1, 2.0), (3, 4.0)], "empty": [], "b": [(5, 6.0)]}
    draw_overlay(curves, Path("all.html"), "loss & <more>")
    assert drawn.axis.lines == [
        ((1, 3), (2.0, 4.0), {"label": "a", "linewidth": 1.2}),
        ((5,), (6.0,), {"label": "b", "linewidth": 1.2}),
    ]
    assert drawn.axis.calls == [
        ("set_xlabel", "step"), ("set_ylabel", "loss & <more>"), ("grid", ("alpha", 0.3)),
        ("legend", ("fontsize", "small")),
    ]  # fmt: skip
    assert drawn.text == (
        '<!doctype html>\n<html><head><meta charset="utf-8"><title>loss &amp; &lt;more&gt; of 3 runs</title></head>\n'
        "<body>\n<svg>the drawing</svg>\n</body></html>\n"
    )
    assert (drawn.size, drawn.path) == ((8, 4.5), Path("all.html"))
    draw_overlay({}, Path("all.svg"), "loss")
    assert drawn.text == "<?xml?>\n<svg>the drawing</svg>\n"

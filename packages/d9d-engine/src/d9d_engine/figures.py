"""Creation and rendering of matplotlib figures; matplotlib comes with the extra ``plots``."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from d9d_core.errors import PluginError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["figure_svg", "new_figure"]


def new_figure(width: float, height: float) -> Figure:
    """Make an empty figure of matplotlib.

    Args:
        width: width in inches.
        height: height in inches.

    Raises:
        PluginError: matplotlib is not installed or cannot be imported.
    """
    # Use Figure, because pyplot has global state and may need a window system.
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise PluginError(
            f"pictures need matplotlib ({reason}); install it with: pip install 'd9d-engine[plots]'"
        ) from error
    return Figure(figsize=(width, height), layout="constrained")


def figure_svg(figure: Figure, dpi: int = 200) -> str:
    """Render a figure as SVG, reproducibly: without date, version or random element names.

    Args:
        figure: figure from :func:`new_figure`.
        dpi: dots per inch of rasterized elements.
    """
    from matplotlib import rc_context

    content = StringIO()
    with rc_context({"svg.hashsalt": "d9d"}):  # element names would be random otherwise
        figure.savefig(content, format="svg", dpi=dpi, metadata={"Creator": None, "Date": None})
    return content.getvalue()

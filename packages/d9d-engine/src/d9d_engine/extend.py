"""Names of the engine for authors of strategies, subscribers, schedules and pictures, besides :mod:`d9d_core.extend`.

Importing this module imports no torch; its names are imported when they are used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_engine.compat import (
        keep_fsdp_gradients,
        prepare_fsdp_gradients,
        recomputes_inside_functions,
        reduce_fsdp_gradients,
        settle_fsdp_reduction,
    )
    from d9d_engine.distributed.logs import rank_logger
    from d9d_engine.distributed.positions import ZigzagPositions
    from d9d_engine.figures import figure_svg, new_figure
    from d9d_engine.supervision.compilation import Recompiled

#: Module of each name; they are imported when they are used.
_LAZY = {
    "Recompiled": "d9d_engine.supervision.compilation",
    "ZigzagPositions": "d9d_engine.distributed.positions",
    "figure_svg": "d9d_engine.figures",
    "new_figure": "d9d_engine.figures",
    "keep_fsdp_gradients": "d9d_engine.compat",
    "prepare_fsdp_gradients": "d9d_engine.compat",
    "rank_logger": "d9d_engine.distributed.logs",
    "recomputes_inside_functions": "d9d_engine.compat",
    "reduce_fsdp_gradients": "d9d_engine.compat",
    "settle_fsdp_reduction": "d9d_engine.compat",
}

__all__ = [
    "Recompiled",
    "ZigzagPositions",
    "figure_svg",
    "keep_fsdp_gradients",
    "new_figure",
    "prepare_fsdp_gradients",
    "rank_logger",
    "recomputes_inside_functions",
    "reduce_fsdp_gradients",
    "settle_fsdp_reduction",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

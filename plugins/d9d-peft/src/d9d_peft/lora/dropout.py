"""Dropout of what goes into low-rank terms."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional


def dropped(x: Tensor, fraction: float, training: bool) -> Tensor:
    """Inputs of any shape; while training, without a fraction of them and scaled up."""
    return functional.dropout(x, fraction, training) if fraction else x


def layout_dependence(fraction: float) -> Sequence[str]:
    """Differences between layouts that dropping a fraction makes."""
    return ["dropout of low-rank terms draws for each microbatch as a whole"] if fraction else []

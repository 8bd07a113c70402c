"""Dropout of what goes into low-rank terms. Shapes: I features of an input, R ranks of ``tp``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def dropped(x: Tensor, fraction: float, training: bool, share: tuple[int, int] = (0, 1)) -> Tensor:
    """LoRA dropout of inputs of any shape: while training, without a fraction of them and scaled up.

    Args:
        x: [..., I], or [..., I / R] of a row-wise layer of tensor parallelism.
        fraction: how many become zero.
        training: whether any does.
        share: number of the part of I that ``x`` is, and of parts; ranks with other parts drop independently of it.
    """
    part, parts = share
    if not fraction or parts == 1:
        return functional.dropout(x, fraction, training) if fraction else x
    if not training:
        return x
    # All ranks draw for all features: they use what one process does, and their generators stay at the same place, so
    # that layers whose inputs are whole on all ranks drop the same on all of them.
    whole = torch.ones(*x.shape[:-1], parts * x.shape[-1], dtype=x.dtype, device=x.device)
    kept = functional.dropout(whole, fraction).chunk(parts, dim=-1)[part] != 0
    return x * kept / (1 - fraction)


def layout_dependence(fraction: float) -> Sequence[str]:
    """Differences between layouts that dropping a fraction makes."""
    return ["dropout of low-rank terms draws for each microbatch as a whole"] if fraction else []

"""Dropout of the inputs of low-rank updates. Shapes: I features of an input, R ranks of ``tp``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional


def dropped(x: Tensor, fraction: float, training: bool, share: tuple[int, int] = (0, 1)) -> Tensor:
    """LoRA dropout: in training, sets a fraction of the inputs to zero and scales the other inputs up.

    Args:
        x: [..., I], or [..., I / R] in a row-wise layer of tensor parallelism.
        fraction: fraction of the inputs to drop.
        training: whether inputs are dropped; in evaluation they are not.
        share: index of the part of I in ``x``, and number of parts; each rank drops only features of its own part.
    """
    part, parts = share
    if not fraction or parts == 1:
        return functional.dropout(x, fraction, training) if fraction else x
    if not training:
        return x
    # All ranks draw for all features, as one process would; their generators stay in the same state, so that layers
    # with the whole input on every rank drop the same inputs on all of them.
    whole = torch.ones(*x.shape[:-1], parts * x.shape[-1], dtype=x.dtype, device=x.device)
    kept = functional.dropout(whole, fraction).chunk(parts, dim=-1)[part] != 0
    return x * kept / (1 - fraction)


def layout_dependence(fraction: float) -> Sequence[str]:
    """Describe how dropping a fraction of the inputs depends on the layout; empty if no inputs are dropped."""
    return ["dropout of low-rank updates draws random numbers per microbatch"] if fraction else []

"""Padding of tensors of different lengths to a common length. Shapes: B tensors, S positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor


def pad_stack(
    items: Sequence[Tensor], value: float, side: Literal["left", "right"] = "right", multiple: int = 1
) -> Tensor:
    """Stack one-dimensional tensors, padded to the longest; for use in a collate function.

    Args:
        items: B tensors [S_b] of one dtype.
        value: value of the padding.
        side: side of the padding.
        multiple: divisor of S.

    Returns:
        Tensor [B, S], S being the longest S_b rounded up to ``multiple``.

    Raises:
        ValueError: there is no tensor, a tensor has another number of dims or another dtype, ``multiple`` is below 1,
            or ``side`` is unknown.
    """
    if not items:
        raise ValueError("there are no tensors to stack; give at least one")
    if multiple < 1:
        raise ValueError(f"multiple is {multiple}; give 1 or more")
    if side not in ("left", "right"):
        raise ValueError(f"side is {side!r}; use 'left' or 'right'")
    for index, item in enumerate(items):
        if item.ndim != 1:
            raise ValueError(f"tensor {index} has shape {list(item.shape)}; only tensors of one dim can be padded")
        if item.dtype != items[0].dtype:
            raise ValueError(f"tensor {index} has dtype {item.dtype}, but tensor 0 has {items[0].dtype}; use one")
    longest = -(-max(len(item) for item in items) // multiple) * multiple
    stacked = torch.full((len(items), longest), value, dtype=items[0].dtype, device=items[0].device)
    for row, item in zip(stacked, items, strict=True):
        begin = longest - len(item) if side == "left" else 0
        row[begin : begin + len(item)] = item
    return stacked

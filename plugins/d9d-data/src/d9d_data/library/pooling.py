"""Masks of the positions that are pooled into one state per sequence. Shapes: B sequences, S positions."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def pooling_mask(attention_mask: Tensor, pool: Literal["first", "last", "all"]) -> Tensor:
    """Pooling mask: the positions to pool, chosen from the positions that are not padding.

    A mean over the mask gives the first token, the last token or the mean of all tokens, for padding on any side. Does
    not synchronise with the device.

    Args:
        attention_mask: [B, S], 0 or false at padding.
        pool: positions to pool.

    Returns:
        [B, S] in the mask's dtype, 1 or true at pooled positions; all 0 or false in a sequence without tokens.

    Raises:
        ValueError: the mask has another number of dims, or ``pool`` is unknown.
    """
    if attention_mask.ndim != 2:
        raise ValueError(f"an attention mask has shape [B, S], not {list(attention_mask.shape)}")
    present = attention_mask != 0  # [B, S]
    if pool == "all":
        chosen = present
    elif pool == "first":
        chosen = present & (present.cumsum(1) == 1)
    elif pool == "last":
        chosen = present & (present.flip(1).cumsum(1).flip(1) == 1)
    else:
        raise ValueError(f"pool is {pool!r}; use 'first', 'last' or 'all'")
    return chosen.to(attention_mask.dtype) if attention_mask.dtype != torch.bool else chosen

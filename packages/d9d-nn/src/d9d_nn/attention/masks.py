"""What the layers of a stage see, made once per forward and shared by all of them.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from d9d_nn.attention.core import AttentionCore


class AttentionMasks:
    """Documents, and what the backends in use made of them: one mask per backend and window, not one per layer.

    Neither a dict nor a dataclass: FSDP's mixed precision rebuilds those for every layer and casts what floats.

    Args:
        documents: int64 [B, S]; ``None`` if a sample is one document.
        prepared: the masks, by :attr:`d9d_nn.ops.attention_slot.AttentionSlot.mask_key`.
    """

    __slots__ = ("documents", "prepared")

    def __init__(self, documents: Tensor | None, prepared: Mapping[tuple[str, int | None], Any]) -> None:
        self.documents = documents
        self.prepared = prepared


def prepare_masks(
    cores: Iterable[AttentionCore], documents: Tensor | None, length: int, device: torch.device
) -> AttentionMasks:
    """Make the masks that these cores need.

    Models call it once per forward, before their layers, so that a mask is neither made again in each layer nor, with
    activation checkpointing, in the backward.

    Args:
        cores: of all layers of the stage.
        documents: int64 [B, S]; ``None`` if a sample is one document.
        length: S.
        device: where the stage computes.
    """
    prepared: dict[tuple[str, int | None], Any] = {}
    for core in cores:
        if core.attention.mask_key not in prepared:
            prepared[core.attention.mask_key] = core.attention.prepare(documents, length, device)
    return AttentionMasks(documents, prepared)

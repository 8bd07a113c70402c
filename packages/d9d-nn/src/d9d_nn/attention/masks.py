"""Attention masks of a stage, made once per forward and shared by all layers.

Shapes: B samples, S positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from d9d_core.attention import Documents
from torch import Tensor

from d9d_nn.ops.attention.slot import AttentionSlot, MaskKey


class AttentionMasks:
    """Documents, and the masks that attention backends made from them: one per backend, window and kind of mask.

    This class is neither a dict nor a dataclass, because FSDP's mixed precision would rebuild a dict or dataclass for
    every layer and cast its float tensors.

    Args:
        documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
        prepared: masks by :attr:`d9d_nn.ops.attention.slot.AttentionSlot.mask_key`.
    """

    __slots__ = ("documents", "prepared")

    def __init__(self, documents: Documents, prepared: Mapping[MaskKey, Any]) -> None:
        self.documents = documents
        self.prepared = prepared


def prepare_masks(
    slots: Iterable[AttentionSlot], documents: Documents, length: int, device: torch.device
) -> AttentionMasks:
    """Make the attention masks for the layers of these slots.

    Models call it once per forward, before their layers, so that masks are not made again in each layer or, with
    activation checkpointing, in the backward.

    Args:
        slots: attention slots of all layers of the stage.
        documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
        length: S.
        device: device of the stage.
    """
    prepared: dict[MaskKey, Any] = {}
    for slot in slots:
        if slot.mask_key not in prepared:
            prepared[slot.mask_key] = slot.prepare(documents, length, device)
    return AttentionMasks(documents, prepared)


def separated_padding(documents: Tensor | None, lengths: Tensor, length: int) -> Tensor:
    """Document indices int64 [B, S], in which the padding of a sample gets an index of its own.

    Args:
        documents: int64 [B, S]; ``None`` if a sample is one document.
        lengths: int64 [B], tokens of each right-padded sample.
        length: S.
    """
    padding = torch.arange(length, device=lengths.device) >= lengths[:, None]
    if documents is None:
        return padding.to(torch.int64)
    return torch.where(padding, documents.amax(dim=1, keepdim=True) + 1, documents)

"""Inputs and targets of multi-token prediction. Shapes: B samples, S positions, D depths."""

from __future__ import annotations

import torch
from torch import Tensor

from d9d_nn.ops.linear_cross_entropy import IGNORE

#: Names of the model inputs of multi-token prediction, int64 [B, S, D]: ids of later tokens, and their targets.
MTP_TOKENS, MTP_TARGETS = "mtp_tokens", "mtp_targets"
#: Value of the input :data:`MTP_TOKENS` at positions where the later token is not in the same document.
NO_TOKEN = -1


def further_targets(
    tokens: Tensor,
    targets: Tensor,
    depths: int,
    *,
    documents: Tensor | None = None,
    lengths: Tensor | None = None,
) -> dict[str, Tensor]:
    """Shift tokens and targets of whole samples for each depth of multi-token prediction.

    At depth k (1 to D), position i reads the token of position i + k and predicts the target of position i + k, if that
    position is in the same document. A target of -100 stays -100.

    Args:
        tokens: int64 [B, S], all positions of the samples.
        targets: int64 [B, S]; -100 where nothing is predicted.
        depths: D.
        documents: int64 [B, S]; ``None`` if a sample is one document.
        lengths: int64 [B], tokens of each right-padded sample; ``None`` if there is no padding.

    Returns:
        ``mtp_tokens`` int64 [B, S, D], -1 where the document has no such token, and ``mtp_targets`` int64 [B, S, D],
        -100 where nothing is predicted.
    """
    length = tokens.shape[1]
    places = torch.arange(length, device=tokens.device).unsqueeze(0)  # [1, S]
    ends: Tensor | int = length if lengths is None else lengths.unsqueeze(1)  # [B, 1]
    ids, aims = [], []
    for depth in range(1, depths + 1):
        inside = (places + depth < ends).expand(tokens.shape)  # [B, S]
        if documents is not None:
            inside = inside & (_shifted(documents, depth) == documents)
        ids.append(torch.where(inside, _shifted(tokens, depth), NO_TOKEN))
        aims.append(torch.where(inside, _shifted(targets, depth), IGNORE))
    return {MTP_TOKENS: torch.stack(ids, dim=-1), MTP_TARGETS: torch.stack(aims, dim=-1)}


def _shifted(values: Tensor, by: int) -> Tensor:
    """Values [B, S] of the positions ``by`` places later; the last values are arbitrary."""
    return values.roll(-by, dims=1)

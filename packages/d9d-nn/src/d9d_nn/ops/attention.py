"""``attention``: causal softmax attention inside documents, with grouped key and value heads.

Shapes: B samples, S positions, N query heads, K key/value heads (N = K * G), D features of a head.

Backends are functions with the signature of :func:`attention`. The slot's static facts are ``head_dim``,
``query_heads``, ``key_value_heads`` and ``causal``.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def visible(length: int, documents: Tensor | None, device: torch.device) -> Tensor:
    """Which keys a query sees: those at its own and earlier positions, in its own document.

    Args:
        length: S.
        documents: int64 [B, S], number of the document of each token; ``None`` if a sample is one document.
        device: where the result lives.

    Returns:
        bool [S, S], or [B, S, S] with documents; ``[..., query, key]``. The diagonal is always true.
    """
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril_()
    if documents is None:
        return causal
    return causal & (documents[:, :, None] == documents[:, None, :])


def attention(query: Tensor, key: Tensor, value: Tensor, documents: Tensor | None = None) -> Tensor:
    """Reference: ``softmax(query @ key.T / sqrt(D), over visible keys) @ value``, the softmax in float32 or wider.

    Query head n reads key and value head ``n // G`` (Ainslie et al. 2023, "GQA", section 2.2). The scores of all pairs
    exist at once: [B, N, S, S].

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D].
        value: [B, S, K, D].
        documents: int64 [B, S]; ``None`` if a sample is one document.

    Returns:
        [B, S, N, D] in the dtype of ``value``.
    """
    samples, length, heads, features = query.shape
    grouped = query.view(samples, length, key.shape[2], -1, features)
    scores = torch.einsum("bskgd,btkd->bkgst", grouped, key) / math.sqrt(features)
    mask = visible(length, documents, query.device)
    if documents is not None:
        mask = mask[:, None, None]
    widest = torch.promote_types(scores.dtype, torch.float32)
    probabilities = scores.masked_fill(~mask, -math.inf).softmax(dim=-1, dtype=widest)
    mixed = torch.einsum("bkgst,btkd->bskgd", probabilities.to(value.dtype), value)
    return mixed.reshape(samples, length, heads, features)

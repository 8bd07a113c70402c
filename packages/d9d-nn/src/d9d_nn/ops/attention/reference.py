"""Op ``attention``: softmax attention within documents, with grouped key and value heads.

Shapes: B samples, S positions, N query heads, K key/value heads (N = K * G), D features of a query or key head, V of a
value head.

The slot's static facts are ``head_dim``, ``query_heads``, ``key_value_heads``, ``causal`` and ``window``, ``mask`` if
the attention is not causal (:mod:`d9d_core.attention`), and ``value_dim`` if V is not D; a backend refuses kinds of
masks and windows that it cannot compute. With a soft cap of the scores, the op is called ``capped_attention``, and with
sinks ``sink_attention``, so that no backend can ignore the cap or the sinks. A backend is a
function ``(query, key, value, mask)``, for ``sink_attention`` ``(query, key, value, mask, sinks)``, where ``mask`` is
``documents`` as in :func:`attention` or, if the function has an attribute ``prepare``, the return value of ``prepare``;
see :class:`d9d_nn.ops.attention.slot.AttentionSlot`.
"""

from __future__ import annotations

import math

import torch
from d9d_core.attention import Documents, MaskKind, documents_and_blocks
from torch import Tensor


def visible(
    length: int,
    documents: Documents,
    device: torch.device,
    window: int | None = None,
    queries: Tensor | None = None,
    *,
    mask: MaskKind = "causal",
) -> Tensor:
    """Reference mask of attention: the positions that a query sees, by its document, window and block.

    Args:
        length: S.
        documents: int64 [B, S], number of the document of each token, also with blocks; ``None`` if a sample is one
            document.
        device: device of the result.
        window: number of positions that a query sees, including its own, in each direction that it sees; ``None`` for
            all. A window hides no position of a query's own block.
        queries: int64 [Q], positions of the queries; ``None`` for all.
        mask: kind of the mask, see :mod:`d9d_core.attention`.

    Returns:
        bool [Q, S], or [B, Q, S] with documents or blocks; ``[..., query, key]``. A query sees itself.
    """
    documents, blocks = documents_and_blocks(documents)
    if queries is None:
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        seen = seen if mask == "bidirectional" else seen.tril_()
        if window is not None:
            seen = seen.triu_(1 - window)
            seen = seen.tril_(window - 1) if mask == "bidirectional" else seen
    else:
        behind = queries[:, None] - torch.arange(length, device=device)
        behind = behind.abs() if mask == "bidirectional" else behind
        seen = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    rows = slice(None) if queries is None else queries
    if mask == "blocks" and blocks is not None:
        own = blocks[:, rows, None]
        seen = seen | ((own == blocks[:, None, :]) & (own >= 0))
    if documents is None:
        return seen
    return seen & (documents[:, rows, None] == documents[:, None, :])


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents = None,
    sinks: Tensor | None = None,
    *,
    window: int | None = None,
    softcap: float | None = None,
    mask: MaskKind = "causal",
) -> Tensor:
    """Reference attention: ``softmax(query @ key.T / sqrt(D), over visible keys) @ value``, in float32 or wider.

    Query head n reads key and value head ``n // G`` (Ainslie et al. 2023, "GQA", section 2.2). The scores of all pairs
    are in memory at once: [B, N, S, S].

    Args:
        query: [B, S, N, D].
        key: [B, S, K, D].
        value: [B, S, K, V].
        documents: int64 [B, S] or ``DocumentBlocks``; ``None`` if a sample is one document.
        sinks: [N], a learned score of each head that takes part in the softmax and has no value (OpenAI 2025,
            "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2); ``None`` for none.
        window: a query sees a key only if ``0 <= query position - key position < window`` (Beltagy et al. 2020,
            "Longformer", section 3.1, causal), or ``abs(query position - key position) < window`` if the attention is
            bidirectional; ``None`` for all keys.
        softcap: each score x becomes ``softcap * tanh(x / softcap)`` before the softmax (Gemma team 2024, "Gemma 2",
            section 2); ``None`` leaves scores as they are.
        mask: kind of the mask, see :mod:`d9d_core.attention`.

    Returns:
        [B, S, N, V] in the dtype of ``value``.
    """
    samples, length, heads, features = query.shape
    grouped = query.view(samples, length, key.shape[2], -1, features)
    scores = torch.einsum("bskgd,btkd->bkgst", grouped, key) / math.sqrt(features)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    seen = visible(length, documents, query.device, window, mask=mask)
    if seen.dim() == 3:
        seen = seen[:, None, None]
    widest = torch.promote_types(scores.dtype, torch.float32)
    scores = scores.masked_fill(~seen, -math.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(key.shape[2], -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probabilities = scores.softmax(dim=-1, dtype=widest)[..., :length]
    mixed = torch.einsum("bkgst,btkd->bskgd", probabilities.to(value.dtype), value)
    return mixed.reshape(samples, length, heads, value.shape[-1])

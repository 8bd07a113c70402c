"""Contrastive loss over the texts of all ranks and microbatches, and its gradients with respect to the embeddings.

Shapes: Q queries of this rank, N texts of this rank for each query (the first belongs to it), R ranks, D features, C
queries or texts of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from d9d_core.first_pass import DataRanks
from torch import Tensor
from torch.nn import functional

#: Largest number of similarities in memory at a time.
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Contrast:
    """Contrastive loss of this rank's queries.

    Attributes:
        losses: loss of each query, float32 [Q]; zero for queries without a loss.
        hits: whether a query's own text is the most similar of all texts, bool [Q]; false for queries without a loss.
        query_gradient: gradient of the sum of all ranks' losses with respect to the queries, [Q, D].
        text_gradient: gradient of this sum with respect to the texts, [Q, N, D].
    """

    losses: Tensor
    hits: Tensor
    query_gradient: Tensor
    text_gradient: Tensor


def contrast(
    queries: Tensor,
    texts: Tensor,
    ranks: DataRanks,
    temperature: float,
    symmetric: bool,
    present: Tensor | None = None,
) -> Contrast:
    """Compute the contrastive loss of each query against the texts of all queries of all ranks, and its gradients.

    Collective over ``ranks``. The loss of query i is ``-log softmax_j(q_i . t_j / temperature)`` at its own text. With
    ``symmetric``, it is the mean of this loss and of the loss computed with queries and first texts exchanged.

    Args:
        queries: float32 [Q, D].
        texts: float32 [Q, N, D].
        ranks: ranks that hold the batch's queries; Q and N are equal on all ranks.
        present: bool [Q, 1 + N]: whether each query (column 0) and each of its texts exists; ``None`` if all do. Absent
            texts are never compared. A query has a loss if it and its own text exist.
        temperature: divisor of the similarities.
        symmetric: whether the loss also compares each text with all queries.
    """
    count, per_query, _ = texts.shape
    if present is None:
        present = torch.ones(count, 1 + per_query, dtype=torch.bool, device=queries.device)
    counted = present[:, 0] & present[:, 1]
    places = (ranks.rank * count + torch.arange(count, device=queries.device)) * per_query
    share = 0.5 if symmetric else 1.0
    losses, hits, query_gradient, text_gradient = _one_way(
        queries, texts.flatten(0, 1), places, counted, present[:, 1:].flatten(), ranks, temperature
    )
    text_gradient = text_gradient.view_as(texts)
    if symmetric:
        back = _one_way(texts[:, 0], queries, places // per_query, counted, present[:, 0], ranks, temperature)
        losses = (losses + back[0]) * share
        query_gradient = (query_gradient + back[3]) * share
        text_gradient = text_gradient * share
        text_gradient[:, 0] += back[2] * share
    return Contrast(losses, hits, query_gradient, text_gradient)


def _one_way(
    anchors: Tensor,
    candidates: Tensor,
    places: Tensor,
    counted: Tensor,
    present: Tensor,
    ranks: DataRanks,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compare each of this rank's anchors with the candidates of all ranks. Collective over ``ranks``.

    Args:
        anchors: [Q, D], anchors of this rank: queries, or texts in the opposite direction.
        candidates: [M, D], candidates of this rank.
        places: int64 [Q], index of each anchor's own candidate among the candidates of all ranks.
        counted: bool [Q], whether each anchor has a loss.
        present: bool [M], whether each candidate exists; absent candidates are not compared.
        ranks: ranks that hold the batch's anchors and candidates.
        temperature: divisor of the similarities.

    Returns:
        Loss of each anchor [Q]; whether its own candidate is the most similar one, bool [Q]; and the gradients of the
        sum of all ranks' losses with respect to this rank's anchors [Q, D] and candidates [M, D].
    """
    everything = ranks.all_gather(candidates)  # [R * M, D]
    absent = ~ranks.all_gather(present)
    candidate_gradient = torch.zeros_like(everything)
    anchor_gradient = torch.empty_like(anchors)
    losses = anchors.new_empty(len(anchors))
    hits = torch.empty(len(anchors), dtype=torch.bool, device=anchors.device)
    rows = max(1, _CHUNK_ELEMENTS // len(everything))
    for start in range(0, len(anchors), rows):
        chunk = slice(start, start + rows)
        own = places[chunk].unsqueeze(1)  # [C, 1]
        similarities = (anchors[chunk] @ everything.T / temperature).masked_fill_(absent, -torch.inf)  # [C, R * M]
        logs = functional.log_softmax(similarities, dim=1)
        hits[chunk] = (logs.argmax(1) == places[chunk]) & counted[chunk]
        losses[chunk] = torch.where(counted[chunk], -logs.gather(1, own).squeeze(1), 0)
        grad = logs.exp_().scatter_add_(1, own, torch.full_like(own, -1, dtype=logs.dtype)).div_(temperature)
        grad = torch.where(counted[chunk].unsqueeze(1), grad, 0)
        anchor_gradient[chunk] = grad @ everything
        candidate_gradient.addmm_(grad.T, anchors[chunk])
    mine = slice(ranks.rank * len(candidates), (ranks.rank + 1) * len(candidates))
    return losses, hits, anchor_gradient, ranks.all_reduce(candidate_gradient)[mine]

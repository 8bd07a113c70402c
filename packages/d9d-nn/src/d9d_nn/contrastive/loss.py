"""Contrastive loss over the texts of all ranks and microbatches, and its gradient with respect to the embeddings.

Shapes: Q queries of this rank, N texts of this rank for each query (the first belongs to it), R ranks, D features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from d9d_core.extend import DataRanks
from torch import Tensor
from torch.nn import functional

#: Similarities that exist at once.
_CHUNK_ELEMENTS = 1 << 26


@dataclass(frozen=True, slots=True)
class Contrast:
    """Contrastive loss of this rank's queries.

    Attributes:
        losses: loss of each query, float32 [Q].
        hits: whether the text that belongs to a query is the most similar one, bool [Q].
        queries: gradient of the sum over all ranks' queries, [Q, D].
        texts: likewise, [Q, N, D].
    """

    losses: Tensor
    hits: Tensor
    queries: Tensor
    texts: Tensor


def contrast(
    queries: Tensor,
    texts: Tensor,
    ranks: DataRanks,
    temperature: float,
    symmetric: bool,
    there: Tensor | None = None,
) -> Contrast:
    """Compare each query with the texts of all queries of all ranks.

    Collective over ``ranks``. The loss of query i is ``-log softmax_j(q_i . t_j / temperature)`` at its own text; with
    ``symmetric`` the mean of that and of the same with queries and first texts exchanged.

    Args:
        queries: float32 [Q, D].
        texts: float32 [Q, N, D].
        ranks: those that have other queries; Q and N are equal on all.
        there: bool [Q, 1 + N], whether query and texts are there; ``None`` if all are. What is not there is compared
            with nothing. A query counts, with a loss, if it and its own text are there.
        temperature: divides similarities.
        symmetric: whether texts look for their queries too.
    """
    count, per_query, _ = texts.shape
    if there is None:
        there = torch.ones(count, 1 + per_query, dtype=torch.bool, device=queries.device)
    counted = there[:, 0] & there[:, 1]
    places = (ranks.rank * count + torch.arange(count, device=queries.device)) * per_query
    share = 0.5 if symmetric else 1.0
    losses, hits, of_queries, of_texts = _one_way(
        queries, texts.flatten(0, 1), places, counted, there[:, 1:].flatten(), ranks, temperature
    )
    of_texts = of_texts.view_as(texts)
    if symmetric:
        back = _one_way(texts[:, 0], queries, places // per_query, counted, there[:, 0], ranks, temperature)
        losses = (losses + back[0]) * share
        of_queries = (of_queries + back[3]) * share
        of_texts = of_texts * share
        of_texts[:, 0] += back[2] * share
    return Contrast(losses, hits, of_queries, of_texts)


def _one_way(
    seekers: Tensor,
    candidates: Tensor,
    places: Tensor,
    counted: Tensor,
    there: Tensor,
    ranks: DataRanks,
    temperature: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses and hits of seekers [Q, D] among the candidates [M, D] of all ranks, and the gradients of both.

    Args:
        seekers: of this rank.
        candidates: of this rank, M.
        places: int64 [Q], which candidate of all ranks belongs to each seeker.
        counted: bool [Q], which seekers have a loss.
        there: bool [M], which candidates are there.
        ranks: those that have other seekers and candidates.
        temperature: divides similarities.
    """
    everything = ranks.all_gather(candidates)  # [R * M, D]
    absent = ~ranks.all_gather(there)
    of_candidates = torch.zeros_like(everything)
    of_seekers = torch.empty_like(seekers)
    losses = seekers.new_empty(len(seekers))
    hits = torch.empty(len(seekers), dtype=torch.bool, device=seekers.device)
    rows = max(1, _CHUNK_ELEMENTS // len(everything))
    for start in range(0, len(seekers), rows):
        chunk = slice(start, start + rows)
        own = places[chunk].unsqueeze(1)  # [C, 1]
        similarities = (seekers[chunk] @ everything.T / temperature).masked_fill_(absent, -torch.inf)  # [C, R * M]
        logs = functional.log_softmax(similarities, dim=1)
        hits[chunk] = (logs.argmax(1) == places[chunk]) & counted[chunk]
        losses[chunk] = torch.where(counted[chunk], -logs.gather(1, own).squeeze(1), 0)
        grad = logs.exp_().scatter_add_(1, own, torch.full_like(own, -1, dtype=logs.dtype)).div_(temperature)
        grad = torch.where(counted[chunk].unsqueeze(1), grad, 0)
        of_seekers[chunk] = grad @ everything
        of_candidates.addmm_(grad.T, seekers[chunk])
    mine = slice(ranks.rank * len(candidates), (ranks.rank + 1) * len(candidates))
    return losses, hits, of_seekers, ranks.all_reduce(of_candidates)[mine]

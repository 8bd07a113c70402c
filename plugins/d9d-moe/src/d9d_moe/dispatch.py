"""How tokens reach their experts and return: the protocol, and the implementation for experts of the same process.

Shapes: T tokens, H features, E experts, k experts of a token, R rows that reach the experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from d9d_moe.permutation import gather_rows, weighted_sum
from d9d_moe.routing import Routing


class Dispatched(NamedTuple):
    """Tokens where their experts are.

    Attributes:
        tokens: [R, H], sorted by expert.
        counts: int64 [E], rows of each expert, on the device of the tokens.
        spare_rows: whether there may be more rows than counts add up to. Those belong to nobody.
        handle: what :meth:`Dispatcher.combine` of the same dispatcher needs.
    """

    tokens: Tensor
    counts: Tensor
    spare_rows: bool
    handle: Any


class Dispatcher(Protocol):
    """Brings tokens to experts, and what experts make of them back. Gradients travel the same way."""

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        """Tokens [T, H] -> a row for each expert of each token."""
        ...

    def combine(self, outputs: Tensor, handle: Any) -> Tensor:
        """Outputs of the experts [R, H], in the order of dispatch -> [T, H], their sums weighted by the routing.

        The sum is computed in float32 or wider and rounded once, to the dtype of the outputs.
        """
        ...


class LocalHandle(NamedTuple):
    """Where the rows of a token are, and its weights.

    Attributes:
        places: int64 [T, k], row of each expert of each token.
        weights: [T, k].
    """

    places: Tensor
    weights: Tensor


class LocalDispatcher:
    """All experts are in this process: rows are sorted by expert, within an expert by token.

    The host reads nothing, so a GPU is never waited for. Gradients are sums in a fixed order, without atomics: the
    same input gives the same bits.
    """

    def dispatch(self, tokens: Tensor, routing: Routing) -> Dispatched:
        """Tokens [T, H] -> [T * k, H]."""
        top_k, experts = routing.indices.shape[1], routing.scores.shape[1]
        chosen, order = torch.sort(routing.indices.flatten(), stable=True)  # order: row -> token * k + place in top k
        rows = torch.arange(len(order), device=order.device)
        places = torch.empty_like(order).scatter_(0, order, rows).view_as(routing.indices)
        ends = torch.searchsorted(chosen, torch.arange(experts, device=order.device), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        handle = LocalHandle(places, routing.weights)
        return Dispatched(gather_rows(tokens, order // top_k, places), counts, spare_rows=False, handle=handle)

    def combine(self, outputs: Tensor, handle: LocalHandle) -> Tensor:
        """Outputs [T * k, H] -> [T, H]."""
        return weighted_sum(outputs, handle.places, handle.weights)

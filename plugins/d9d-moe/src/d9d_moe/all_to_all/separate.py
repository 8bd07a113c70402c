"""Dispatcher that sends each choice of a token separately, so that outputs are summed in the same order as locally.

Shapes: T tokens of this rank, H features, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from d9d_core.kernel import OpSlot
from d9d_core.traits import Dispatched, Routing, Transfer
from torch import Tensor

from d9d_moe.all_to_all.dispatcher import AllToAllDispatcher
from d9d_moe.router.routing import TopKRouting


class SeparateDispatcher:
    """Dispatcher of single choices by all-to-all: a token's rank sums the experts' outputs in the order of one process.

    :class:`AllToAllDispatcher` sums the outputs of a rank's experts before it sends them back, so the order of the sum
    depends on the placement of experts. This dispatcher sends each of the T * k choices as a token with one expert: k
    rows per token, instead of at most one row per token and rank.

    Args:
        inner: dispatcher that sends and returns rows.
    """

    def __init__(self, inner: AllToAllDispatcher) -> None:
        self.inner = inner
        self.group = inner.group
        self.outside_graph = inner.outside_graph

    def op_slots(self) -> Mapping[str, OpSlot]:
        """Op slots of the inner dispatcher, which this dispatcher uses too."""
        return self.inner.op_slots()

    def dispatch(self, tokens: Tensor, routing: Routing) -> Transfer[Dispatched]:
        """Start the dispatch of the choices of tokens [T, H]. Collective over the group."""
        slots = torch.arange(routing.indices.numel(), device=tokens.device)
        places = slots.view_as(routing.indices)
        each = TopKRouting(
            routing.indices.reshape(-1, 1),
            torch.ones_like(routing.weights).reshape(-1, 1),
            routing.weights.new_zeros(len(slots), 0),
            routing.counts,
            routing.limit,
            incomplete=routing.incomplete,
        )
        pending = self.inner.dispatch(self.inner.permute(tokens, slots, places), each)
        return _PendingDispatch(pending, slots, places, routing.weights)

    def combine(self, outputs: Tensor, handle: SeparateHandle) -> Transfer[Tensor]:
        """Start the return of the outputs, to be summed to [T, H]. Collective over the group."""
        return _PendingCombine(self.inner.combine(outputs, handle.inner), handle, self.inner.unpermute)


class SeparateHandle(NamedTuple):
    """Handle of a dispatch of single choices.

    Attributes:
        inner: handle of the inner dispatch of the T * k choices.
        slots: int64 [T * k], choice of each row: 0, 1, 2, ...
        places: int64 [T, k], row of each choice.
        weights: [T, k], factors of the experts' outputs.
    """

    inner: Any
    slots: Tensor
    places: Tensor
    weights: Tensor


class _PendingDispatch:
    def __init__(self, pending: Transfer[Dispatched], slots: Tensor, places: Tensor, weights: Tensor) -> None:
        self._pending, self._sums = pending, (slots, places, weights)

    def wait(self) -> Dispatched:
        sent = self._pending.wait()
        return sent._replace(handle=SeparateHandle(sent.handle, *self._sums))


class _PendingCombine:
    def __init__(self, pending: Transfer[Tensor], handle: SeparateHandle, unpermute: OpSlot) -> None:
        self._pending, self._handle, self._unpermute = pending, handle, unpermute

    def wait(self) -> Tensor:
        handle = self._handle
        total: Tensor = self._unpermute(self._pending.wait(), handle.slots, handle.places, handle.weights)
        return total

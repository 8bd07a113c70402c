"""Dispatcher for experts of the same process.

Shapes: T tokens, H features, E experts, k experts of a token, R rows that reach the experts.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import torch
from d9d_core.traits import Dispatched, Routing
from torch import Tensor

from d9d_moe.dispatch.permutation import PermutingDispatcher

T = TypeVar("T")


class CompletedTransfer(Generic[T]):
    """Transfer that is complete from the start, because no communication is needed.

    Args:
        value: result of :meth:`wait`.
    """

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        """Return the value."""
        return self._value


class LocalHandle(NamedTuple):
    """Row indices and weights of a dispatch, for its combine.

    Attributes:
        slots: int64 [R], index ``token * k + choice`` of each row.
        places: int64 [T, k], row of each choice; R or more for a choice without a row.
        weights: [T, k], factors of the experts' outputs.
        absent: whether some choices may have no row.
    """

    slots: Tensor
    places: Tensor
    weights: Tensor
    absent: bool


class LocalDispatcher(PermutingDispatcher):
    """Local dispatcher: sorts the rows of one process by expert, within an expert by token.

    The host does not wait for the device. Gradients are sums in a fixed order, without atomics, so the same input gives
    the same bits.
    """

    def dispatch(self, tokens: Tensor, routing: Routing) -> CompletedTransfer[Dispatched]:
        """Copy tokens [T, H] to rows [T * k, H], or with a limit to at most E * limit rows.

        Rows of dropped choices come last, as spare rows, which belong to no expert.
        """
        rows = routing.indices.numel()
        if routing.limit is not None:
            rows = min(rows, len(routing.counts) * routing.limit)
        slots, places = sort_by_expert(routing.indices, rows, len(routing.counts))
        handle = LocalHandle(slots, places, routing.weights, absent=rows < places.numel())
        sent = self.permute(tokens, slots, places, absent=handle.absent)
        return CompletedTransfer(Dispatched(sent, routing.counts, spare_rows=routing.incomplete, handle=handle))

    def combine(self, outputs: Tensor, handle: LocalHandle) -> CompletedTransfer[Tensor]:
        """Sum outputs [R, H] to [T, H], weighted by the routing."""
        total = self.unpermute(outputs, handle.slots, handle.places, handle.weights, absent=handle.absent)
        return CompletedTransfer(total)


def sort_by_expert(experts: Tensor, rows: int, dropped: int) -> tuple[Tensor, Tensor]:
    """Assign a row to each choice, sorted by expert, then by token.

    Args:
        experts: integers [T, k], expert of each choice.
        rows: R, at least the number of choices that are not dropped; further rows go to dropped choices.
        dropped: index of a dropped choice: the number of experts, which sorts to the end.

    Returns:
        Slots int64 [R], the choice of each row, out of T * k; and places int64 [T, k], the row of each choice, R or
        more for a dropped choice without a row.
    """
    # A GPU sorts by digits; with 64-bit keys it would read and write all choices eight times.
    narrow = torch.uint8 if dropped < 2**8 else torch.int16 if dropped < 2**15 else torch.int64
    order = torch.sort(experts.flatten().to(narrow), stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order[:rows], places.view_as(experts)

"""How tokens reach their experts and return: the protocol, and the implementation for experts of the same process.

Shapes: T tokens, H features, E experts, k experts of a token, R rows that reach the experts.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from d9d_moe.permutation import gather_rows, weighted_sum
from d9d_moe.routing import Routing

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Transfer(Protocol[T_co]):
    """Something on its way. What is computed between its start and :meth:`wait` overlaps with it."""

    def wait(self) -> T_co:
        """What has arrived; call it once. Later work on the device comes after the arrival."""
        ...


class Arrived(Generic[T]):
    """A transfer that takes no time.

    Args:
        value: what :meth:`wait` returns.
    """

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    def wait(self) -> T:
        """The value."""
        return self._value


class Dispatched(NamedTuple):
    """Tokens where their experts are.

    Attributes:
        tokens: [R, H], sorted by expert.
        counts: int64 [experts of this process], rows of each expert, on the device of the tokens.
        spare_rows: whether there may be more rows than counts add up to. Those belong to nobody.
        handle: what :meth:`Dispatcher.combine` of the same dispatcher needs.
    """

    tokens: Tensor
    counts: Tensor
    spare_rows: bool
    handle: Any


class Dispatcher(Protocol):
    """Brings tokens to experts, and what experts make of them back. Gradients travel the same way.

    One that reaches other ranks has their process group as attribute ``group``; so who overlaps a forward and a
    backward (d9d-pipeline) knows that something is sent.
    """

    def dispatch(self, tokens: Tensor, routing: Routing) -> Transfer[Dispatched]:
        """Start to bring tokens [T, H] to their experts. Collective over the ranks that share the experts."""
        ...

    def combine(self, outputs: Tensor, handle: Any) -> Transfer[Tensor]:
        """Start to bring outputs [R, H], in the order of dispatch, back as [T, H]: sums weighted by the routing.

        Collective over the ranks that share the experts. Sums are computed in float32 or wider. They are rounded to
        the dtype of the outputs where they leave a rank, and once at the end.
        """
        ...


class LocalHandle(NamedTuple):
    """Where the rows of a token are, and its weights.

    Attributes:
        slots: int64 [R], which of the T * k choices each row is.
        places: int64 [T, k], row of each choice; R or more for one that has none.
        weights: [T, k].
        absent: whether some choices may have no row.
    """

    slots: Tensor
    places: Tensor
    weights: Tensor
    absent: bool


class LocalDispatcher:
    """All experts are in this process: rows are sorted by expert, within an expert by token.

    The host reads nothing, so a GPU is never waited for. Gradients are sums in a fixed order, without atomics: the
    same input gives the same bits.
    """

    def dispatch(self, tokens: Tensor, routing: Routing) -> Arrived[Dispatched]:
        """Tokens [T, H] -> [T * k, H]; with a limit at most E * limit rows, the last of which may be spare."""
        rows = routing.indices.numel()
        if routing.limit is not None:
            rows = min(rows, len(routing.counts) * routing.limit)
        slots, places = sort_by_expert(routing.indices, rows)
        handle = LocalHandle(slots, places, routing.weights, absent=rows < places.numel())
        sent = gather_rows(tokens, slots, places, absent=handle.absent)
        return Arrived(Dispatched(sent, routing.counts, spare_rows=routing.limit is not None, handle=handle))

    def combine(self, outputs: Tensor, handle: LocalHandle) -> Arrived[Tensor]:
        """Outputs [R, H] -> [T, H]."""
        return Arrived(weighted_sum(outputs, handle.slots, handle.places, handle.weights, absent=handle.absent))


def sort_by_expert(experts: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Give each choice a row: sorted by expert, within an expert by token.

    Args:
        experts: integers [T, k], the expert of each choice. One past the last stands for nobody and sorts to the end.
        rows: R, as many as somebody has chosen, or more: those go to nobody's choices.

    Returns:
        Slots int64 [R], which of the T * k choices a row is, and places int64 [T, k], the row of a choice; nobody's
        may have none, and then R or more.
    """
    order = torch.sort(experts.flatten(), stable=True).indices
    places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    return order[:rows], places.view_as(experts)

"""Experts spread over the ranks of a group; tokens reach them by ``all_to_all_single``.

Shapes: T tokens of this rank, H features, k experts of a token, W ranks, S rows that leave this rank, N rows that
arrive, R rows of this rank's experts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from d9d_core.extend import BuildError
from torch import Tensor
from torch import distributed as dist

from d9d_moe.all_to_all_trip import Trip, send_back
from d9d_moe.dispatch import Dispatched, sort_by_expert
from d9d_moe.exchange import Flights, Sizes
from d9d_moe.exchange_side import SideStream
from d9d_moe.overlap import Departure
from d9d_moe.permutation import gather_rows, sum_rows, weighted_sum
from d9d_moe.routing import Routing, count_rows


class AllToAllDispatcher:
    """Rank r of W has the experts from ``r * E / W`` on; gloo or NCCL.

    A token travels once to each rank that has some of its experts, with their numbers and weights. There it is copied
    to them, and their weighted outputs are summed; the parts return, and the token's own rank adds them up. Gradients
    take the same way. Sums have a fixed order, so the same input gives the same bits.

    Dispatch takes three collectives (sizes, labels, tokens), combine one, and the backward of both three. On a GPU the
    host waits once for the sizes, in :meth:`~d9d_moe.dispatch.Transfer.wait` of the dispatch, so after what was
    launched in between; with ``Routing.limit`` sizes follow from shapes, rows are padded, and nothing waits.

    Args:
        group: the ranks.
        experts: E.

    Raises:
        BuildError: the experts cannot be shared out equally.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        ranks = group.size()
        if experts % ranks:
            raise BuildError(
                f"AllToAllDispatcher: {experts} experts cannot be shared out equally to {ranks} ranks; "
                "choose a number of ranks that divides the number of experts"
            )
        self.group = group
        self.experts = experts
        self.local = experts // ranks
        self._side = SideStream()

    def dispatch(self, tokens: Tensor, routing: Routing) -> Sending:
        """Start to bring tokens [T, H] to their experts. Collective over the group.

        With ``routing.limit``, all ranks must have the same T, k and limit: they are compared on the device.
        """
        if len(routing.counts) != self.experts:
            raise ValueError(
                f"AllToAllDispatcher: built for {self.experts} experts, the routing has {len(routing.counts)}; "
                "build router and dispatcher with the same number"
            )
        return Sending(Trip(tokens, routing, self.group, self.local, self._side))

    def combine(self, outputs: Tensor, handle: AllToAllHandle) -> Returning:
        """Start to bring outputs [R, H] back as [T, H]. Collective over the group."""
        parts = weighted_sum(outputs, handle.slots, handle.places, handle.weights, absent=True)
        flight = Flights((parts,), handle.sizes.back(), self.group)
        return Returning(Departure((parts,)), flight, handle, self.group)


class AllToAllHandle(NamedTuple):
    """The way back.

    Attributes:
        sizes: of the exchange of tokens.
        slots: int64 [R], which of the N * k choices of arrived rows each row of the experts is.
        places: int64 [N, k], row of each choice; R or more for experts of other ranks.
        weights: [N, k].
        sent_slots: int64 [S], which of the T * W choices of ranks each row that left is.
        sent_places: int64 [T, W], row for each rank; S or more if the token did not travel there.
    """

    sizes: Sizes
    slots: Tensor
    places: Tensor
    weights: Tensor
    sent_slots: Tensor
    sent_places: Tensor


class Sending:
    """Tokens on their way to their experts."""

    __slots__ = ("_trip",)

    def __init__(self, trip: Trip) -> None:
        self._trip = trip

    def wait(self) -> Dispatched:
        """Tokens [R, H] of the experts of this rank."""
        trip = self._trip
        arrived, weights, experts = trip.arrive()  # [N, H], [N, k], [N, k]
        slots, places = sort_by_expert(experts, min(trip.rows, experts.numel()))
        handle = AllToAllHandle(trip.sizes, slots, places, weights, trip.sent_slots, trip.plan.places)
        rows = gather_rows(arrived, slots, places, absent=True)
        return Dispatched(rows, count_rows(experts, trip.local), spare_rows=trip.plan.padded is not None, handle=handle)


class Returning:
    """Outputs on their way to the tokens."""

    __slots__ = ("_departure", "_flight", "_group", "_handle")

    def __init__(self, departure: Departure, flight: Flights, handle: AllToAllHandle, group: dist.ProcessGroup) -> None:
        self._departure = departure
        self._flight = flight
        self._handle = handle
        self._group = group

    def wait(self) -> Tensor:
        """Sums [T, H] of the parts that the ranks made."""
        handle = self._handle
        back = partial(send_back, sizes=handle.sizes, group=self._group)
        (parts,) = self._departure.arrive(self._flight, (), back)
        return sum_rows(parts, handle.sent_slots, handle.sent_places, absent=True)

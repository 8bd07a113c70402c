"""All-to-all dispatcher of tokens to experts on the ranks of a process group.

Shapes: T tokens of this rank, H features, k experts of a token, W ranks, S rows that leave this rank, N rows that
arrive, R rows of this rank's experts.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.traits import Dispatched, Routing
from torch import Tensor
from torch import distributed as dist

from d9d_moe.all_to_all.dispatch_in_flight import DispatchInFlight, return_gradients
from d9d_moe.all_to_all.pending_rows import PendingTensors, Sizes
from d9d_moe.all_to_all.streams import SideStream
from d9d_moe.dispatch.async_exchange import AsyncExchange, OutsideGraph
from d9d_moe.dispatch.local import sort_by_expert
from d9d_moe.dispatch.permutation import PermutingDispatcher


class AllToAllDispatcher(OutsideGraph, PermutingDispatcher):
    """All-to-all dispatcher over gloo or NCCL; rank r of W has experts ``r * E / W`` to ``(r + 1) * E / W - 1``.

    A token is sent once to each rank that has some of its experts, with the indices and weights of all its experts. The
    receiving rank copies the token to its own experts and sums their weighted outputs; the partial sums are sent back,
    and the token's own rank adds them. Gradients are sent in the opposite directions. Sums have a fixed order, so the
    same input gives the same bits.

    Dispatch takes three collectives (counts; tokens; labels, which are experts and weights), combine takes one, and the
    backwards of both together take three. On a GPU the host waits once, for the sizes, in the dispatch's
    :meth:`~d9d_core.traits.Transfer.wait`, after it has launched all work before this ``wait``. With ``Routing.limit``,
    sizes follow from shapes, rows are padded, and the host never waits.

    Args:
        group: process group of the ranks that share the experts.
        experts: E.

    Raises:
        BuildError: the number of ranks does not divide the number of experts.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        ranks = group.size()
        if experts % ranks:
            raise BuildError(
                f"AllToAllDispatcher: {experts} experts cannot be divided equally over {ranks} ranks; "
                "choose a number of ranks that divides the number of experts"
            )
        super().__init__()
        self.group = group
        self.experts = experts
        self.local = experts // ranks
        self._side = SideStream()

    def dispatch(self, tokens: Tensor, routing: Routing) -> PendingDispatch:
        """Start the dispatch of tokens [T, H] to their experts. Collective over the group.

        With ``routing.limit``, all ranks must have the same T, k and limit; the values are compared on the device.

        Raises:
            ValueError: the routing has another number of experts than the dispatcher.
        """
        if len(routing.counts) != self.experts:
            raise ValueError(
                f"AllToAllDispatcher: built for {self.experts} experts, but the routing has {len(routing.counts)}; "
                "build router and dispatcher with the same number"
            )
        in_flight = DispatchInFlight(tokens, routing, self.group, self.local, self._side, self.unpermute)
        return PendingDispatch(in_flight, self.permute)

    def combine(self, outputs: Tensor, handle: AllToAllHandle) -> PendingCombine:
        """Start the combine of outputs [R, H] to [T, H]. Collective over the group."""
        parts = self.unpermute(outputs, handle.slots, handle.places, handle.weights, absent=True)
        pending = PendingTensors((parts,), handle.sizes.back(), self.group)
        return PendingCombine(AsyncExchange((parts,)), pending, handle, self.group, self.unpermute)


class AllToAllHandle(NamedTuple):
    """Row indices and sizes of a dispatch, for its combine.

    Attributes:
        sizes: sizes of the exchange of tokens.
        slots: int64 [R], index ``received row * k + choice`` of each row of the experts.
        places: int64 [N, k], row of the experts for each choice; R or more for experts of other ranks.
        weights: [N, k], factors of the experts' outputs.
        sent_slots: int64 [S], index ``token * W + rank`` of each sent row.
        sent_places: int64 [T, W], sent row for each rank; S or more if the token was not sent to the rank.
    """

    sizes: Sizes
    slots: Tensor
    places: Tensor
    weights: Tensor
    sent_slots: Tensor
    sent_places: Tensor


class PendingDispatch:
    """Dispatch in progress: the result of :meth:`AllToAllDispatcher.dispatch`."""

    __slots__ = ("_in_flight", "_permute")

    def __init__(self, in_flight: DispatchInFlight, permute: OpSlot) -> None:
        self._in_flight = in_flight
        self._permute = permute

    def wait(self) -> Dispatched:
        """Wait for the tokens [R, H] of the experts of this rank."""
        in_flight = self._in_flight
        arrived, weights, experts = in_flight.wait()  # [N, H], [N, k], [N, k]
        slots, places = sort_by_expert(experts, min(in_flight.rows, experts.numel()), in_flight.local)
        handle = AllToAllHandle(in_flight.sizes, slots, places, weights, in_flight.sent_slots, in_flight.plan.places)
        rows = self._permute(arrived, slots, places, absent=True)
        return Dispatched(rows, in_flight.counts, spare_rows=in_flight.plan.padded is not None, handle=handle)


class PendingCombine:
    """Combine in progress: the result of :meth:`AllToAllDispatcher.combine`."""

    __slots__ = ("_exchange", "_group", "_handle", "_pending", "_sum")

    def __init__(
        self,
        exchange: AsyncExchange,
        pending: PendingTensors,
        handle: AllToAllHandle,
        group: dist.ProcessGroup,
        unpermute: OpSlot,
    ) -> None:
        self._exchange = exchange
        self._pending = pending
        self._handle = handle
        self._group = group
        self._sum = unpermute

    def wait(self) -> Tensor:
        """Wait for the outputs, and sum the partial sums of the ranks to [T, H]."""
        handle = self._handle
        back = partial(return_gradients, sizes=handle.sizes, group=self._group)
        (parts,) = self._exchange.wait(self._pending, (), back)
        total: Tensor = self._sum(parts, handle.sent_slots, handle.sent_places, absent=True)
        return total

"""Dispatch that may still be in progress: tokens are sent to their experts' ranks, each with its label.

A label holds a token's experts and weights. In the backward, gradients return to the tokens' ranks.

Shapes: T tokens of this rank, H features, k experts of a token, W ranks, S rows that leave this rank, N rows that
arrive, R rows of this rank's experts.
"""

from __future__ import annotations

from functools import partial

import torch
from d9d_core.kernel import OpSlot
from d9d_core.traits import Routing
from torch import Tensor
from torch import distributed as dist

from d9d_moe.all_to_all.pending_rows import PendingTensors, Sizes, send_rows
from d9d_moe.all_to_all.plan import make_plan, read_labels, tokens_of, write_labels
from d9d_moe.all_to_all.streams import HostNumbers, SideStream
from d9d_moe.dispatch.async_exchange import AsyncExchange, Tensors, untraced

_UNEQUAL = (
    "AllToAllDispatcher: with a limit on the rows of an expert, all ranks must route equally many tokens with the same "
    "top_k and limit, but some differ; give the ranks samples of equal length, or route without a capacity"
)


class DispatchInFlight:
    """All-to-all exchanges of a dispatch that was started. Constructor, :meth:`wait` and backwards are collective.

    Args:
        tokens: tokens of this rank [T, H].
        routing: routing of the tokens.
        group: process group of the W ranks, over which the exchanges are collective.
        local: number of experts on each rank.
        side: side stream of the exchanges.
        unpermute: op that sums the gradients of a token that return from several ranks.

    Attributes:
        plan: ranks to which each token is sent.
        local: number of experts on each rank.
        sizes: numbers of rows by rank; set by :meth:`wait`.
        rows: R, or with padding an upper bound of R; set by :meth:`wait`.
        counts: int64 [experts of this rank], rows of each expert; valid after :meth:`wait`.
    """

    sizes: Sizes
    rows: int
    counts: Tensor

    @untraced  # streams, a host wait, and collectives awaited elsewhere
    def __init__(
        self,
        tokens: Tensor,
        routing: Routing,
        group: dist.ProcessGroup,
        local: int,
        side: SideStream,
        unpermute: OpSlot,
    ) -> None:
        self.plan = make_plan(routing.indices, group.size(), local, routing.limit)
        self.local = local
        self._group, self._ranks, self._side = group, group.size(), side
        # Tokens and routing are kept until the rows have arrived, because the side stream reads both.
        self._tokens, self._routing = tokens.detach(), routing
        self._exchange = AsyncExchange(
            (tokens, routing.weights),
            (self.plan.slots, self.plan.places, routing.indices),
            partial(_to_gradients, local=local, unpermute=unpermute),
        )
        self._pending: PendingTensors | None = None
        with side.active(tokens, follow=True):
            self._pending_sizes = self._exchange_counts()
            # Labels and rows are written for the largest possible number of rows, so that the device works while the
            # host waits for the actual number.
            self._labels = write_labels(self.plan, routing.indices, routing.weights.detach(), len(routing.counts))
            self._rows = self._tokens.index_select(0, tokens_of(self.plan))
        if self.plan.padded is not None:
            self._launch()

    @untraced
    def wait(self) -> tuple[Tensor, Tensor, Tensor]:
        """Wait for the received tokens [N, H], weights [N, k] and expert indices [N, k] on this rank.

        The index ``local`` marks experts of other ranks.
        """
        if self._pending is None:
            self._launch()
        assert self._pending is not None
        back = partial(return_gradients, sizes=self.sizes.back(), group=self._group)
        unpacked = _Unpacked(self._pending, self._group.rank(), self.local)
        tokens, weights, experts = self._exchange.wait(unpacked, (), back)
        if self.counts.is_cuda:  # allocated on the side stream
            self.counts.record_stream(torch.cuda.current_stream(self.counts.device))
        return tokens, weights, experts

    @property
    def sent_slots(self) -> Tensor:
        """``token * W + rank`` of each row that was sent, int64 [S]; arbitrary for padding."""
        return self.plan.slots[: sum(self.sizes.sent)].clamp(min=0)

    def _exchange_counts(self) -> HostNumbers | None:
        """Exchange the row counts of ranks and experts, and start the copy of the counts that the host needs.

        Returns ``None`` with padding, because the host then needs no counts.
        """
        plan, routing, ranks = self.plan, self._routing, self._ranks
        shapes = (*routing.indices.shape, routing.limit or 0)
        heads = [plan.tokens] if plan.padded is None else [torch.full_like(plan.tokens, number) for number in shapes]
        mine = torch.cat([torch.stack(heads, dim=1), routing.counts.view(ranks, self.local)], dim=1)
        theirs = send_rows(mine, Sizes((1,) * ranks, (1,) * ranks), self._group).wait()
        self.counts = theirs[:, len(heads) :].sum(0)
        if plan.padded is None:
            return HostNumbers(torch.cat([plan.tokens, theirs[:, 0], self.counts.sum(0, keepdim=True)]))
        agree = theirs[:, : len(heads)] == mine[:, : len(heads)]
        # ``_assert_async`` is not public, but no public function compares on the device. NCCL would hang if ranks
        # disagree about sizes.
        torch._assert_async(agree.all(), _UNEQUAL)  # noqa: SLF001
        return None

    def _launch(self) -> None:
        """Launch the exchanges of tokens and labels; without padding, the host first waits for the sizes."""
        ranks = self._ranks
        if self._pending_sizes is not None:
            numbers = self._pending_sizes.wait()
            self.sizes = Sizes(tuple(numbers[:ranks]), tuple(numbers[ranks : 2 * ranks]))
            self.rows = numbers[-1]
        else:
            assert self.plan.padded is not None
            assert self._routing.limit is not None
            even = (self.plan.padded,) * ranks
            self.sizes = Sizes(even, even)
            self.rows = ranks * self.local * self._routing.limit
        leaving = sum(self.sizes.sent)
        with self._side.active(self._tokens):
            self._pending = PendingTensors((self._rows[:leaving], self._labels[:leaving]), self.sizes, self._group)
        del self._rows, self._labels  # the pending exchange keeps them until they are sent


class _Unpacked:
    """Exchange of rows [N, H] and labels [N, 2 * k] in progress; :meth:`wait` gives tokens, weights and experts."""

    __slots__ = ("_local", "_pending", "_rank")

    def __init__(self, pending: PendingTensors, rank: int, local: int) -> None:
        self._pending, self._rank, self._local = pending, rank, local

    def wait(self) -> Tensors:
        rows, labels = self._pending.wait()
        experts, weights = read_labels(labels, self._rank, self._local)
        return rows, weights, experts


def return_gradients(grads: Tensors, _saved: Tensors, *, sizes: Sizes, group: dist.ProcessGroup) -> PendingTensors:
    """Start to send back the gradients of rows [N, ...]. Collective over ``group``."""
    return PendingTensors(grads, sizes, group)


def _to_gradients(arrived: Tensors, saved: Tensors, *, local: int, unpermute: OpSlot) -> Tensors:
    """Gradients of tokens [T, H] and weights [T, k], from the gradients of rows [S, H] and of row weights [S, k]."""
    (rows, labels), (slots, places, indices) = arrived, saved
    return unpermute(rows, slots[: len(rows)], places, absent=True), _of_choices(labels, places, indices // local)


def _of_choices(rows: Tensor, places: Tensor, ranks: Tensor) -> Tensor:
    """Gradients [T, k] of the weights, each read in ``rows`` [S, k] at the row that was sent to its expert's rank.

    The gradient of a choice without an expert is zero.
    """
    if not len(rows):
        return rows.new_zeros(ranks.shape)
    absent = ranks >= places.shape[1]
    place = places.gather(1, ranks.masked_fill(absent, 0)).clamp(max=len(rows) - 1)
    return rows.gather(0, place).masked_fill(absent, 0)

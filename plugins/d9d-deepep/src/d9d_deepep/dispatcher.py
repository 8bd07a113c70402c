"""Dispatcher of tokens to experts on other GPUs by DeepEP's kernels.

Shapes: T tokens of this rank, H features, E experts, k experts of a token, N tokens that arrive, R rows of this rank's
experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from d9d_core.errors import BuildError
from d9d_core.kernel import OpSlot
from d9d_core.traits import Dispatched, Routing
from d9d_moe.dispatch.async_exchange import AsyncExchange, OutsideGraph, untraced
from d9d_moe.dispatch.local import sort_by_expert
from d9d_moe.dispatch.permutation import PermutingDispatcher
from d9d_moe.router.routing import count_rows
from torch import Tensor
from torch import distributed as dist

from d9d_deepep.buffer import open_buffer
from d9d_deepep.kernels import Handle, PendingTensors, after, combine, dispatch_again, launch

#: DeepEP moves rows in pieces of this many bytes.
_PIECE = 16


class DeepEPDispatcher(OutsideGraph, PermutingDispatcher):
    """Dispatcher of tokens by DeepEP; rank r of W has the experts from ``r * E / W`` on.

    A token travels once to each rank that has some of its experts. There its weighted outputs are summed; DeepEP adds
    up the sums of the ranks. The backward of a dispatch is a combine and the other way round, along the same handle.

    Kernels run on DeepEP's stream, after what they need: what is computed between start and wait overlaps with them. In
    the wait of the dispatch the host learns the number of rows, as DeepEP has it.

    One buffer serves all layers that share the dispatcher: it is opened by the first dispatch, and again by one with
    wider rows.

    Args:
        group: the ranks.
        experts: E.
        open_buffer: (group, bytes of a row) -> ``deep_ep.Buffer``.

    Raises:
        BuildError: the experts cannot be shared out equally.
    """

    def __init__(
        self, group: dist.ProcessGroup, experts: int, open_buffer: Callable[[Any, int], Any] = open_buffer
    ) -> None:
        if experts % group.size():
            raise BuildError(
                f"DeepEPDispatcher: {experts} experts cannot be shared out equally to {group.size()} ranks; "
                "choose a number of ranks that divides the number of experts"
            )
        super().__init__()
        self.group = group
        self.experts = experts
        self.local = experts // group.size()
        self._open = open_buffer
        self._buffer: Any = None
        self._row_bytes = 0

    def dispatch(self, tokens: Tensor, routing: Routing) -> PendingDispatch:
        """Start the dispatch of tokens [T, H] to their experts. Collective over the group.

        Raises:
            ValueError: dtypes or sizes are not DeepEP's.
        """
        _check(tokens, routing, self.experts)
        row_bytes = tokens.shape[1] * tokens.element_size()
        if row_bytes > self._row_bytes:
            self._buffer, self._row_bytes = self._open(self.group, row_bytes), row_bytes
        return PendingDispatch(self._buffer, tokens, routing, self.experts, self.local, self.permute)

    def combine(self, outputs: Tensor, handle: DeepEPHandle) -> PendingCombine:
        """Start the combine of outputs [R, H] to [T, H]. Collective over the group."""
        parts = self.unpermute(outputs, handle.slots, handle.places, handle.weights, absent=True)
        return PendingCombine(self._buffer, parts, handle.handle)


class DeepEPHandle(NamedTuple):
    """Row numbers and DeepEP's handle of a dispatch, which its combine needs.

    Attributes:
        handle: DeepEP's.
        slots: int64 [R], which of the N * k choices of arrived tokens each row of the experts is.
        places: int64 [N, k], row of each choice; R or more for experts of other ranks.
        weights: float32 [N, k].
    """

    handle: Handle
    slots: Tensor
    places: Tensor
    weights: Tensor


class PendingDispatch:
    """Dispatch that a DeepEP dispatcher has started. :meth:`wait` launches the kernel, as it knows where it begins.

    DeepEP's dispatch makes the host wait for sizes; what is to overlap has been launched by then.
    """

    @untraced
    def __init__(
        self, buffer: Any, tokens: Tensor, routing: Routing, experts: int, local: int, permute: OpSlot
    ) -> None:
        self._buffer, self._local, self._permute = buffer, local, permute
        self._tokens, self._weights = tokens.detach().contiguous(), routing.weights.detach().contiguous()
        self._exchange = AsyncExchange((tokens, routing.weights))
        self._chosen = routing.indices.masked_fill(routing.indices == experts, -1)
        *layout, self._ready = buffer.get_dispatch_layout(self._chosen, experts, **launch(buffer))
        self._per_rank, self._per_rdma_rank, self._per_expert, self._in_rank = layout

    def wait(self) -> Dispatched:
        """Wait for the tokens [R, H] of the experts of this rank."""
        tokens, weights, chosen, count, handle = self._finish()
        foreign = chosen < 0
        experts = chosen.masked_fill(foreign, self._local)
        slots, places = sort_by_expert(experts, count, self._local)
        back = DeepEPHandle(handle, slots, places, weights.masked_fill(foreign, 0))
        rows = self._permute(tokens, slots, places, absent=True)
        return Dispatched(rows, count_rows(experts, self._local), spare_rows=False, handle=back)

    @untraced
    def _finish(self) -> tuple[Tensor, Tensor, Tensor, int, Handle]:
        """Tokens [N, H], weights [N, k], experts [N, k] with -1 for those of other ranks, R, and DeepEP's handle."""
        buffer = self._buffer
        tokens, chosen, weights, counts, parts, event = buffer.dispatch(
            self._tokens,
            topk_idx=self._chosen,
            topk_weights=self._weights,
            num_tokens_per_rank=self._per_rank,
            num_tokens_per_rdma_rank=self._per_rdma_rank,
            is_token_in_rank=self._in_rank,
            num_tokens_per_expert=self._per_expert,
            **after(self._ready),
        )
        handle = Handle(parts)
        empty = handle.shape()
        tokens, weights, chosen = self._exchange.wait(
            PendingTensors((tokens, weights, chosen), event),
            handle.tensors,
            lambda grads, saved: combine(buffer, grads[0], empty.filled(saved), grads[1]),
        )
        return tokens, weights, chosen, sum(counts), handle


class PendingCombine:
    """Combine that was started."""

    @untraced
    def __init__(self, buffer: Any, parts: Tensor, handle: Handle) -> None:
        self._buffer, self._handle = buffer, handle
        self._exchange = AsyncExchange((parts,))
        self._pending = combine(buffer, parts.detach(), handle.filled(handle.tensors))

    def wait(self) -> Tensor:
        """Wait for the sums [T, H]."""
        buffer, empty = self._buffer, self._handle.shape()
        (out,) = self._exchange.wait(
            self._pending,
            self._handle.tensors,
            lambda grads, saved: dispatch_again(buffer, grads[0], empty.filled(saved)),
        )
        return out


def _check(tokens: Tensor, routing: Routing, experts: int) -> None:
    wants = "DeepEPDispatcher: DeepEP moves"
    if tokens.dtype != torch.bfloat16:
        raise ValueError(
            f"{wants} bfloat16, the tokens are {tokens.dtype}; train in bfloat16, or remove 'deepep' from 'parallel'"
        )
    if tokens.shape[1] * tokens.element_size() % _PIECE:
        raise ValueError(
            f"{wants} rows of whole {_PIECE} bytes, the tokens have {tokens.shape[1]} features of 2; "
            f"choose a hidden size that is a multiple of {_PIECE // 2}, or remove 'deepep' from 'parallel'"
        )
    if routing.weights.dtype != torch.float32 or routing.indices.dtype != torch.int64:
        raise ValueError(
            f"{wants} weights of float32 and indices of int64, the router gives {routing.weights.dtype} and "
            f"{routing.indices.dtype}; remove 'deepep' from 'parallel'"
        )
    if len(routing.counts) != experts:
        raise ValueError(
            f"DeepEPDispatcher: built for {experts} experts, the routing has {len(routing.counts)}; "
            "build router and dispatcher with the same number"
        )

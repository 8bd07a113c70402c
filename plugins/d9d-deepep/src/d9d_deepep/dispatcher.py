"""Dispatcher of tokens to experts on other GPUs by DeepEP's kernels.

Shapes: T tokens of this rank, H features, E experts, k experts of a token, N tokens received, R rows of this rank's
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

#: The bytes of a token's hidden state must be a multiple of this.
_PIECE = 16


class DeepEPDispatcher(OutsideGraph, PermutingDispatcher):
    """Dispatcher of tokens by DeepEP; rank r of W holds the ``E / W`` experts from index ``r * E / W`` on.

    A token is sent once to each rank that holds one of its experts. That rank sums the weighted outputs of its experts;
    DeepEP then adds the sums of the ranks. The backward of a dispatch is a combine with the same handle, and vice
    versa.

    Kernels run on DeepEP's stream, after the kernels they depend on, so they overlap with computation between start and
    wait. DeepEP's dispatch makes the host wait for the number of rows; this happens in the dispatch's ``wait``.

    All layers that share the dispatcher share one buffer. The first dispatch opens it; a dispatch of tokens with more
    bytes opens a larger one.

    Args:
        group: process group of the ranks.
        experts: E.
        open_buffer: (group, bytes of a token) -> ``deep_ep.Buffer``.

    Raises:
        BuildError: the number of ranks does not divide the number of experts.
    """

    def __init__(
        self, group: dist.ProcessGroup, experts: int, open_buffer: Callable[[Any, int], Any] = open_buffer
    ) -> None:
        if experts % group.size():
            raise BuildError(
                f"DeepEPDispatcher: {experts} experts cannot be divided equally over {group.size()} ranks; "
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
            ValueError: DeepEP does not support the dtypes or sizes.
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
    """Values of a dispatch that its combine needs: row indices, expert weights and DeepEP's own handle.

    Attributes:
        handle: DeepEP's own handle.
        slots: int64 [R]; for each row of this rank's experts, the index of its choice among the N * k choices (token,
            expert) of received tokens.
        places: int64 [N, k], row of each choice; R or more if the expert is on another rank.
        weights: float32 [N, k], weight of each choice; zero if the expert is on another rank.
    """

    handle: Handle
    slots: Tensor
    places: Tensor
    weights: Tensor


class PendingDispatch:
    """Dispatch started by a DeepEP dispatcher.

    Only :meth:`wait` launches the kernel that sends tokens, because the launch makes the host wait for the number of
    received tokens. Until then, the host can launch computation that overlaps with the kernel. The kernel itself waits
    only for work that was launched before the dispatch started.
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
        """Wait for the tokens [R, H] of this rank's experts."""
        tokens, weights, chosen, count, handle = self._finish()
        foreign = chosen < 0
        experts = chosen.masked_fill(foreign, self._local)
        slots, places = sort_by_expert(experts, count, self._local)
        back = DeepEPHandle(handle, slots, places, weights.masked_fill(foreign, 0))
        rows = self._permute(tokens, slots, places, absent=True)
        return Dispatched(rows, count_rows(experts, self._local), spare_rows=False, handle=back)

    @untraced
    def _finish(self) -> tuple[Tensor, Tensor, Tensor, int, Handle]:
        """Received tokens [N, H], the weights [N, k] and experts [N, k] of their choices, R, and DeepEP's handle.

        Experts are indices among this rank's experts; -1 if the expert is on another rank.
        """
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
    """Combine started by a DeepEP dispatcher."""

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
            f"{wants} rows of a multiple of {_PIECE} bytes, the tokens have {tokens.shape[1]} features of 2 bytes; "
            f"choose a hidden size that is a multiple of {_PIECE // 2}, or remove 'deepep' from 'parallel'"
        )
    if routing.weights.dtype != torch.float32 or routing.indices.dtype != torch.int64:
        raise ValueError(
            f"{wants} float32 weights and int64 indices, the router returns {routing.weights.dtype} and "
            f"{routing.indices.dtype}; remove 'deepep' from 'parallel'"
        )
    if len(routing.counts) != experts:
        raise ValueError(
            f"DeepEPDispatcher: built for {experts} experts, the routing has {len(routing.counts)}; "
            "build router and dispatcher with the same number"
        )

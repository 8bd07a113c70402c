"""Stands in for ``deep_ep.Buffer`` on gloo: the documented interface and its demands on arguments, and no more.

Elements that a kernel has not written yet are NaN: a result is filled in when its event is awaited.
"""

from __future__ import annotations

from typing import Any

import torch
from d9d_deepep.dispatcher import DeepEPDispatcher
from torch import Tensor
from torch import distributed as dist


def build(group: dist.ProcessGroup, experts: int) -> DeepEPDispatcher:
    return DeepEPDispatcher(group, experts, Buffer)


class Event:
    def __init__(self) -> None:
        self.results: list[tuple[Tensor, Tensor]] = []

    def later(self, result: Tensor) -> Tensor:
        pending = torch.full_like(result, float("nan") if result.is_floating_point() else -7)
        self.results.append((pending, result))
        return pending

    def current_stream_wait(self) -> None:
        for pending, result in self.results:
            pending.copy_(result)


class Buffer:
    """Rows are kept by the rank that they come from, then by token."""

    def __init__(self, group: dist.ProcessGroup, row_bytes: int) -> None:
        self.group, self.ranks, self.row_bytes = group, group.size(), row_bytes

    @staticmethod
    def capture() -> Event:
        return Event()

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int, previous_event: Any, async_finish: bool, allocate_on_comm_stream: bool
    ) -> tuple[Tensor, None, Tensor, Tensor, Event]:
        assert async_finish
        assert allocate_on_comm_stream
        assert topk_idx.dtype == torch.int64
        assert ((topk_idx >= -1) & (topk_idx < num_experts)).all()
        owner = topk_idx.div(num_experts // self.ranks, rounding_mode="floor")
        in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.ranks)], dim=1)
        per_expert = torch.stack([(topk_idx == expert).sum() for expert in range(num_experts)]).int()
        event = previous_event
        return event.later(in_rank.sum(0).int()), None, event.later(per_expert), in_rank, event

    def dispatch(
        self,
        x: Tensor,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, tuple[Any, ...] | None, Event]:
        assert async_finish
        assert allocate_on_comm_stream
        self.check(x)
        previous_event.current_stream_wait()
        event = Event()
        if handle is not None:
            assert topk_idx is topk_weights is None
            in_rank, received, _ = handle
            return event.later(self.exchange(self.outgoing(x, in_rank), in_rank, received)), *(None,) * 4, event
        in_rank = is_token_in_rank
        assert topk_idx.dtype == torch.int64
        assert topk_weights.dtype == torch.float32
        assert num_tokens_per_rdma_rank is None
        assert num_tokens_per_rank.tolist() == in_rank.sum(0).tolist()
        received = torch.zeros_like(num_tokens_per_rank)
        dist.all_to_all_single(received, num_tokens_per_rank, group=self.group)
        rows, chosen, weights = (
            self.exchange(self.outgoing(tensor, in_rank), in_rank, received) for tensor in (x, topk_idx, topk_weights)
        )
        local = len(num_tokens_per_expert) // self.ranks
        chosen = chosen - dist.get_rank(self.group) * local
        foreign = (chosen < 0) | (chosen >= local)
        chosen, weights = chosen.masked_fill(foreign, -1), weights.masked_fill(foreign, 0)
        counts = [int((chosen == expert).sum()) for expert in range(local)]
        arrived = tuple(event.later(result) for result in (rows, chosen, weights))
        return *arrived, counts, (in_rank, received, self.row_bytes), event

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        previous_event: Any = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Event]:
        assert async_finish
        assert allocate_on_comm_stream
        self.check(x)
        event = Event()
        total = event.later(self.summed(x, handle))
        if topk_weights is None:
            return total, None, event
        assert topk_weights.dtype == torch.float32
        return total, event.later(self.summed(topk_weights, handle)), event

    def check(self, x: Tensor) -> None:
        assert x.dtype == torch.bfloat16
        assert x.is_contiguous()
        assert x.shape[1] * 2 % 16 == 0
        assert x.shape[1] * 2 <= self.row_bytes

    def outgoing(self, x: Tensor, in_rank: Tensor) -> Tensor:
        return torch.cat([x[in_rank[:, rank]] for rank in range(self.ranks)])

    def exchange(self, rows: Tensor, in_rank: Tensor, received: Tensor, *, back: bool = False) -> Tensor:
        splits = [received.tolist(), in_rank.sum(0).tolist()]
        arriving, leaving = reversed(splits) if back else splits
        out = rows.new_empty(sum(arriving), rows.shape[1])
        dist.all_to_all_single(out, rows, arriving, leaving, group=self.group)
        return out

    def summed(self, x: Tensor, handle: tuple[Any, ...]) -> Tensor:
        in_rank, received, _ = handle
        parts = self.exchange(x, in_rank, received, back=True).float().split(in_rank.sum(0).tolist())
        total = torch.zeros(len(in_rank), x.shape[1])
        for rank, part in enumerate(parts):
            total[in_rank[:, rank]] += part
        return total.to(x.dtype)

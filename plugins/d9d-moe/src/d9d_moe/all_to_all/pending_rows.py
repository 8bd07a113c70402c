"""All-to-all exchange of rows between the ranks of a group, started first and awaited later.

Shapes: S rows sent, sorted by receiving rank; N rows received, sorted by sending rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from d9d_moe.dispatch.async_exchange import untraced


@dataclass(frozen=True, slots=True)
class Sizes:
    """Numbers of rows that an exchange sends to each rank and receives from each rank.

    Attributes:
        sent: number of rows for each rank.
        received: number of rows from each rank.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]

    def back(self) -> Sizes:
        """Sizes of the exchange in the opposite direction."""
        return Sizes(self.received, self.sent)


class PendingRows:
    """All-to-all in progress; neither sent nor received rows may be used before :meth:`wait`.

    Args:
        leaving: rows to send, kept alive until :meth:`wait`.
        arriving: memory for the received rows [N, ...].
        work: handle of the collective.
    """

    __slots__ = ("_arriving", "_leaving", "_work")

    def __init__(self, leaving: Tensor, arriving: Tensor, work: Any) -> None:
        self._leaving: Tensor | None = leaving
        self._arriving = arriving
        self._work = work

    def wait(self) -> Tensor:
        """Wait for the rows [N, ...]; on a GPU, only the current stream waits."""
        self._work.wait()
        self._leaving = None
        if self._arriving.is_cuda:  # it may have been allocated on another stream
            self._arriving.record_stream(torch.cuda.current_stream(self._arriving.device))
        return self._arriving


def send_rows(rows: Tensor, sizes: Sizes, group: dist.ProcessGroup) -> PendingRows:
    """Start an exchange of rows [S, ...], without gradients. Collective over ``group``."""
    leaving = rows.detach().contiguous()
    arriving = rows.new_empty(sum(sizes.received), *rows.shape[1:])
    splits = list(sizes.received), list(sizes.sent)
    work = dist.all_to_all_single(arriving, leaving, *splits, group=group, async_op=True)
    return PendingRows(leaving, arriving, work)


class PendingTensors:
    """All-to-all of several tensors of rows between the same ranks.

    Args:
        tensors: rows to send, [S, ...] each.
        sizes: sizes of the exchange.
        group: process group; one collective for each tensor.
    """

    __slots__ = ("_pending",)

    @untraced  # torch.compile supports only collectives awaited at once
    def __init__(self, tensors: Sequence[Tensor], sizes: Sizes, group: dist.ProcessGroup) -> None:
        self._pending = [send_rows(rows, sizes, group) for rows in tensors]

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for the rows [N, ...] of each tensor."""
        return tuple(pending.wait() for pending in self._pending)

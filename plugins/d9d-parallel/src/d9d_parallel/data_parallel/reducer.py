"""Reducer of stages wrapped by FSDP2, which decides after which backwards of a step gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from d9d_engine.compat import keep_fsdp_gradients, reduce_fsdp_gradients
from torch.distributed.fsdp import FSDPModule

#: Reductions of gradients that are deferred to the last microbatch of a step.
Deferred = Literal["nothing", "all_reduce", "everything"]


class FsdpReducer:
    """Reducer (:class:`d9d_core.strategy.Reducer`) of data parallelism: switches FSDP2's reductions by microbatch.

    A backward is incomplete if it leaves weight gradients for later, as in zero-bubble pipelines. From the first
    incomplete backward of a step on, nothing is reduced until :meth:`reduce`, whatever ``defer`` is, because a unit's
    gradients are reduced together and some are not computed yet.

    Args:
        root: stage wrapped by FSDP2.
    """

    def __init__(self, root: FSDPModule) -> None:
        self._root = root
        self._entries: list[_Entry] = []
        self._waiting = False

    def add(self, units: Sequence[FSDPModule], defer: Deferred) -> None:
        """Add the units of one entry of ``parallel``, and the reductions that it defers to the last microbatch."""
        self._entries.append(_Entry(units, defer))

    def before_backward(self, last: bool, complete: bool = True) -> None:
        """Set the reductions of the next backward.

        Args:
            last: whether the next backward is the last one of the step.
            complete: whether the next backward computes all weight gradients; if not, some follow later.
        """
        self._waiting |= not complete
        last = last and not self._waiting
        self._root.set_is_last_backward(last)
        for entry in self._entries:
            entry.reduce_next(not self._waiting and (last or entry.defer != "everything"), last)

    def after_weights(self) -> None:
        """Add the new gradients to the sums of earlier microbatches, in the accumulation format."""
        keep_fsdp_gradients(self._root)

    def reduce(self) -> None:
        """Reduce all gradients that are deferred. Collective over the ranks of all units of the stage."""
        self._waiting = False
        self._root.set_is_last_backward(True)
        for entry in self._entries:
            entry.reduce_next(True, True)
        reduce_fsdp_gradients(self._root)


class _Entry:
    """Units of one entry of ``parallel``.

    Attributes:
        defer: reductions deferred to the last microbatch.
    """

    def __init__(self, units: Sequence[FSDPModule], defer: Deferred) -> None:
        self.defer = defer
        self._units = units
        self._reduces = True

    def reduce_next(self, reduces: bool, last: bool) -> None:
        """Set whether the next backward reduces gradients, and whether it is the last one."""
        if reduces != self._reduces:
            for unit in self._units:
                unit.set_requires_gradient_sync(reduces, recurse=False)
            self._reduces = reduces
        if self.defer == "all_reduce":
            for unit in self._units:
                unit.set_requires_all_reduce(last, recurse=False)

"""Reducer of stages wrapped by FSDP2, which decides after which backwards of a step gradients are reduced."""

from __future__ import annotations

from typing import Literal

from d9d_engine.compat import keep_fsdp_gradients, reduce_fsdp_gradients
from torch.distributed.fsdp import FSDPModule


class FsdpReducer:
    """Reducer (:class:`d9d_core.strategy.Reducer`) of data parallelism: switches FSDP2's reductions by microbatch.

    From the first incomplete backward of a step on, nothing is reduced until :meth:`reduce`, whatever ``defer`` is,
    because the gradients of a unit are reduced together and some are not computed yet.

    Args:
        root: stage wrapped by FSDP2.
        defer: reductions deferred to the last microbatch.
    """

    def __init__(self, root: FSDPModule, defer: Literal["nothing", "all_reduce", "everything"]) -> None:
        self._root = root
        self._defer = defer
        self._waiting = False
        self._syncs = True

    def before_backward(self, last: bool, complete: bool = True) -> None:
        """Set the reductions of the next backward.

        Args:
            last: whether it is the last of the step.
            complete: whether it also computes the weight gradients.
        """
        self._waiting |= not complete
        last = last and not self._waiting
        self._root.set_is_last_backward(last)
        self._sync(not self._waiting and (last or self._defer != "everything"))
        if self._defer == "all_reduce":
            self._root.set_requires_all_reduce(last)

    def after_weights(self) -> None:
        """Add the new gradients to the sums of earlier microbatches, in the accumulation format."""
        keep_fsdp_gradients(self._root)

    def reduce(self) -> None:
        """Reduce all gradients that are deferred. Collective over the ranks of all units of the stage."""
        self._waiting = False
        self._root.set_is_last_backward(True)
        self._sync(True)
        if self._defer == "all_reduce":
            self._root.set_requires_all_reduce(True)
        reduce_fsdp_gradients(self._root)

    def _sync(self, on: bool) -> None:
        if on != self._syncs:
            self._root.set_requires_gradient_sync(on)
            self._syncs = on

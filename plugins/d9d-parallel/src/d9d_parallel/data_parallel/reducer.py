"""Telling FSDP2 which backward is the last of a step."""

from __future__ import annotations

from typing import Literal

from torch.distributed.fsdp import FSDPModule


class FsdpReducer:
    """Switches the reductions of a stage on and off between microbatches; see :class:`d9d_core.protocols.Reducer`.

    Args:
        root: the stage.
        defer: what waits for the last microbatch.
    """

    def __init__(self, root: FSDPModule, defer: Literal["nothing", "all_reduce", "everything"]) -> None:
        self._root = root
        self._defer = defer

    def before_backward(self, last: bool) -> None:
        """Set what the coming backward reduces.

        Args:
            last: it is the last of the step.
        """
        self._root.set_is_last_backward(last)
        if self._defer == "everything":
            self._root.set_requires_gradient_sync(last)
        elif self._defer == "all_reduce":
            self._root.set_requires_all_reduce(last)

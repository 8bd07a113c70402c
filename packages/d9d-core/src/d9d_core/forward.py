"""Forward of the model in training on microbatches of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from d9d_core.types import Microbatch, Pack

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ForwardPass"]


class ForwardPass(Protocol):
    """Forward of the model as it is now: in evaluation mode, without gradients, and without a trace in the training.

    Parameters, modes, random generators and the position of the data are afterwards what they were.
    """

    @property
    def least_microbatches(self) -> int:
        """Least number of microbatches that the pipeline's schedule takes."""
        ...

    def __call__(self, pack: Pack, outputs: Callable[[Mapping[str, Tensor], Microbatch], None]) -> None:
        """Run forward over microbatches. Collective over all ranks, which give packs of the same shapes.

        Ranks that share parameters must agree in how often they call; those of one pipeline give the same pack.

        Args:
            pack: microbatches on the device, each with ``tokens`` int64 [B, S] for the first stage; what else they
                hold, such as ``lengths`` int64 [B] of right-padded samples, reaches every stage by its name.
            outputs: called with what the last stage returns for each microbatch, on the ranks that have that stage.
        """
        ...

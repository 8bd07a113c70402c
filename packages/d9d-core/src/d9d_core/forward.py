"""Protocol of the function by which subscribers run the model under training on their own microbatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

from d9d_core.types import Microbatch, Pack

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ForwardPass"]


class ForwardPass(Protocol):
    """Forward pass of the current model: in evaluation mode, without gradients, without effect on the training.

    Parameters, modes, random generators and the position of the data are restored afterwards.
    """

    @property
    def least_microbatches(self) -> int:
        """Smallest number of microbatches that the pipeline schedule accepts."""
        ...

    def __call__(self, pack: Pack, outputs: Callable[[Mapping[str, Tensor], Microbatch], None]) -> None:
        """Run the forward on microbatches, of equal numbers and shapes on all ranks. Collective over all ranks.

        Ranks that share parameters must make the same number of calls; ranks of one pipeline must pass equal tensors.

        Args:
            pack: microbatches on the device, each with ``tokens`` int64 [B, S] for the first stage. Further tensors,
                such as ``lengths`` int64 [B] of right-padded samples, are passed to every stage by name.
            outputs: called with the last stage's outputs and the microbatch, on the ranks that hold the last stage.
        """
        ...

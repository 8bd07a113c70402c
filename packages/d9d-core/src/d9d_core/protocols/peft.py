"""Parameter-efficient fine-tuning methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import nn


class PeftMethod(Protocol):
    """Parameter-efficient fine-tuning method."""

    def inject(self, stage: nn.Module) -> frozenset[str]:
        """Change the stage in place and return the names of the parameters that train; all others are frozen.

        Raises:
            BuildError: nothing matched.
        """
        ...

    def merge(self, stage: nn.Module) -> None:
        """Fold what was injected back into the original parameters, for export.

        Called for every export; the stage, its tensors and this object are put back afterwards, bit for bit.
        """
        ...

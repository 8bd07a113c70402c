"""Parameter-efficient fine-tuning methods.

Start here: :class:`PeftMethod` changes a stage and returns the names of the parameters that train::

    class Biases:
        def __init__(self, config): ...

        def inject(self, stage):
            return frozenset(name for name, _ in stage.named_parameters() if name.endswith(".bias"))

        def merge(self, stage): ...

Optional: :class:`StartsFromWeights`, :class:`SwitchesOff`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import nn

__all__ = ["PeftMethod", "StartsFromWeights", "SwitchesOff"]


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


@runtime_checkable
class StartsFromWeights(Protocol):
    """Start of a fine-tuning method whose tensors begin as functions of the model's weights."""

    def start(self, stage: nn.Module) -> None:
        """Fill what was added, from the model's weights as training starts from them.

        Called once, when these are there, drawn or pretrained; an adapter or a checkpoint is loaded afterwards.
        Parameters may be sharded. Collective over the ranks that share them.

        Args:
            stage: a stage with the method injected, or several as one module.
        """
        ...


@runtime_checkable
class SwitchesOff(Protocol):
    """Switch of a fine-tuning method that only adds to a model; one that trains the model's own parameters has none.

    So a model is its own reference: a task that compares the tuned model with the one it started from needs no copy.
    """

    def off(self, stage: nn.Module) -> AbstractContextManager[None]:
        """Compute as the model did before injection, inside the block.

        It holds for a forward without gradients, or with its backward inside the block too; also where blocks are
        compiled (once more for this case) or parameters are sharded. Blocks may nest. Names, tensors and what trains
        stay as they are. An attribute that a forward reads is enough; in a hook, compiled code would not see it change.

        Args:
            stage: a stage with the method injected, or several as one module.
        """
        ...

"""Parameter-efficient fine-tuning methods.

Start here: :class:`PeftMethod` changes a stage and returns the names of its trainable parameters::

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
        """Change the stage in place and return the names of the trainable parameters; all other parameters are frozen.

        Raises:
            BuildError: the method's patterns match no module or parameter.
        """
        ...

    def merge(self, stage: nn.Module) -> None:
        """Merge the added tensors into the original parameters, for export.

        Called for every export; afterwards, the caller restores the stage, its tensors and this object bit for bit.
        """
        ...


@runtime_checkable
class StartsFromWeights(Protocol):
    """Optional protocol of a fine-tuning method that initialises its tensors from the model's weights."""

    def start(self, stage: nn.Module) -> None:
        """Initialise the added tensors from the model's initial weights.

        Called once, after these weights were drawn or loaded; an adapter or a checkpoint is loaded afterwards.
        Parameters may be sharded. Collective over the ranks that shard them.

        Args:
            stage: a stage with the method injected, or several stages as one module.
        """
        ...


@runtime_checkable
class SwitchesOff(Protocol):
    """Optional protocol of a fine-tuning method that only adds to a model, so that it can be disabled.

    Tasks that compare the tuned model with the original model then need no copy of the model.
    """

    def off(self, stage: nn.Module) -> AbstractContextManager[None]:
        """Compute like the original model inside the block.

        The block may contain a forward without gradients, or a forward and its backward. The method also works with
        compiled modules, which are compiled once more for this case, and with sharded parameters. Blocks may nest.
        Names, tensors and the set of trained parameters do not change. Implement the method by an attribute that the
        forward reads: compiled code would not notice a change in a hook.

        Args:
            stage: a stage with the method injected, or several stages as one module.
        """
        ...

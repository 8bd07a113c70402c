"""Tasks whose loss needs a first forward over all microbatches of a step, by the trained model or a frozen model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from d9d_core.task import StageInputs
from d9d_core.types import Microbatch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["DataRanks", "FirstPass", "PassModel", "TwoPassTask"]

#: Models that can run a first pass, see :class:`FirstPass`.
PassModel = Literal["model", "without_adapter", "copy", "stored", "frozen", "other"]


@dataclass(frozen=True, slots=True)
class FirstPass:
    """Choice of the model that runs a first pass.

    Attributes:
        by: model of the first pass. ``model``: the trained model, with the random draws (dropout) of the second pass.
            ``without_adapter``: the trained model with its adapter disabled. ``copy``: a frozen copy of the model at
            the start of the run. ``stored``: the model at the start of the run, evaluated once on all samples before
            the first step; microbatches need ``samples`` int64 [B], the index of each sample in the dataset, and the
            data stream needs the fact ``samples``. ``frozen``: ``without_adapter`` if possible, else ``copy``.
            ``other``: the model given by ``other``.
        other: config of another model, with ``pretrained``.
        where: field of the job file that makes this choice, for messages.
    """

    by: PassModel
    other: Any = None
    where: str = "task"


class DataRanks(Protocol):
    """Communication between the data-parallel ranks, for :meth:`TwoPassTask.complete`."""

    @property
    def rank(self) -> int:
        """Index of this rank in the group."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the ranks' tensors, [n, ...] each, to [ranks * n, ...]. Collective over these ranks."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the ranks' tensors in place. Collective over these ranks."""
        ...


@runtime_checkable
class TwoPassTask(Protocol):
    """Optional protocol of a :class:`~d9d_core.task.Task` that needs a first forward, without gradients, in each step.

    The forward runs over all microbatches of the step and adds tensors to them, for the task's ``losses`` and
    ``observations``. The added tensors exist only on ranks that hold the last pipeline stage, so ``weights``, ``count``
    and ``inputs`` must not read them. Evaluations make a first pass too.
    """

    @property
    def first_pass(self) -> FirstPass:
        """Model that runs the first pass."""
        ...

    def first_inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of the first-pass model for a microbatch."""
        ...

    def first_outputs(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Tensors to keep of the first-pass outputs: name in the microbatch -> detached tensor.

        If :attr:`FirstPass.by` is ``stored``, each tensor has shape [B, ...], one entry per sample.
        """
        ...

    def complete(self, kept: Sequence[Mapping[str, Tensor]], ranks: DataRanks) -> Sequence[Mapping[str, Tensor]]:
        """Tensors to add to each microbatch of the step, from the kept tensors of all its microbatches.

        Most tasks return ``kept`` unchanged. If the method communicates, it is collective over the ranks that see
        different samples. If :attr:`FirstPass.by` is ``stored``, the method is not called.
        """
        ...

"""Tasks whose loss needs a first forward over the whole pack, by the model itself or by a frozen one."""

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
        by: ``model``: the trained model as it is, with the draws (dropout) of the second pass. ``without_adapter``: the
            trained model without the terms of its fine-tuning method. ``copy``: a frozen copy of the model as the run
            starts. ``stored``: the model as the run starts, once for all samples and before the first step; it needs
            ``samples`` int64 [B] in microbatches, the number of each sample in the dataset, and the fact ``samples``.
            ``frozen``: ``without_adapter`` if that is possible, else ``copy``. ``other``: the model ``other``.
        other: config of that model, with ``pretrained``.
        where: field of the job file that decides, for messages.
    """

    by: PassModel
    other: Any = None
    where: str = "task"


class DataRanks(Protocol):
    """Ranks that see different samples, as the second half of a first pass sees them."""

    @property
    def rank(self) -> int:
        """Number of this rank among them."""
        ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Tensors of all ranks, [n, ...] each, in a row: [ranks * n, ...]. Collective over these ranks."""
        ...

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of the ranks' tensors, in place. Collective over these ranks."""
        ...


@runtime_checkable
class TwoPassTask(Protocol):
    """Optional side of a :class:`~d9d_core.task.Task`: a first pass over the pack, without gradients.

    Its tensors are added to the microbatches, for ``losses`` and ``observations``. They exist only on the ranks that
    have the last stage, so ``weights``, ``count`` and ``inputs`` do without. Evaluations make a first pass too.
    """

    @property
    def first_pass(self) -> FirstPass:
        """Model that runs the first pass."""
        ...

    def first_inputs(self, microbatch: Microbatch) -> StageInputs:
        """Keyword arguments of that model for this microbatch."""
        ...

    def first_outputs(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Tensors to keep of that model's outputs for this microbatch, by the names they get in it; detached.

        With ``stored``, one number or row for each sample: [B, ...].
        """
        ...

    def complete(self, kept: Sequence[Mapping[str, Tensor]], ranks: DataRanks) -> Sequence[Mapping[str, Tensor]]:
        """Tensors to add to each microbatch of the pack, from what was kept of all; often just that.

        Collective over the ranks that see different samples, if it communicates. Not called with ``stored``.
        """
        ...

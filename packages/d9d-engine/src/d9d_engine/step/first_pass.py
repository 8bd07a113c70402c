"""First pass over the microbatches of a step: a forward without gradients, whose outputs the loss uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from d9d_core.first_pass import TwoPassTask
from d9d_core.types import Microbatch, Pack
from torch import Tensor
from torch import distributed as dist

from d9d_engine.step.executor import Executor


class FirstPassRunner(Protocol):
    """Protocol of a function that runs the first pass over the microbatches of a step."""

    def __call__(self, pack: Pack, step: int | None) -> Pack:
        """Add first-pass tensors to the microbatches of a step. Collective over all ranks.

        Args:
            pack: microbatches on the device.
            step: number of the step, 0-based; ``None`` in an evaluation.
        """
        ...


def no_first_pass(pack: Pack, step: int | None) -> Pack:  # noqa: ARG001 - see FirstPassRunner
    """Return the pack unchanged, for tasks without a first pass."""
    return pack


class FirstForward:
    """First pass that runs a forward over all microbatches of a step, before the trained forward.

    Args:
        task: selects the outputs to keep, and computes the added tensors.
        executor: runs the model.
        around: returns a context manager that sets the model's mode, such as evaluation mode.
        ranks: ranks with different samples.
        draws: whether to draw the random numbers of the training step, if there is one.
    """

    def __init__(
        self,
        task: TwoPassTask,
        executor: Executor,
        around: Callable[[], AbstractContextManager[object]],
        ranks: GroupRanks,
        draws: bool = False,
    ) -> None:
        self._task = task
        self._executor = executor
        self._around = around
        self._ranks = ranks
        self._draws = draws

    def outputs(self, pack: Pack, step: int | None = None) -> list[Mapping[str, Tensor]]:
        """Kept outputs of each microbatch, in order; empty on ranks without the last stage. Collective over ``pp``."""
        kept: dict[int, Mapping[str, Tensor]] = {}

        def keep(outputs: Mapping[str, Tensor], microbatch: Microbatch) -> None:
            kept[id(microbatch)] = self._task.first_outputs(outputs, microbatch)

        with self._around():
            self._executor.evaluate(pack, keep, step if self._draws else None)
        return [kept[id(microbatch)] for microbatch in pack] if kept else []

    def __call__(self, pack: Pack, step: int | None) -> Pack:
        """Run the first pass; see :class:`FirstPassRunner`."""
        kept = self.outputs(pack, step)
        if not kept:
            return pack
        added = self._task.complete(kept, self._ranks)
        return [{**microbatch, **more} for microbatch, more in zip(pack, added, strict=True)]


class StoredOutputs:
    """First pass that looks up results of a whole dataset by sample index.

    Args:
        table: name -> tensor [samples, ...] on the device.
    """

    def __init__(self, table: Mapping[str, Tensor]) -> None:
        self._table = table

    def __call__(self, pack: Pack, step: int | None) -> Pack:  # noqa: ARG002
        """Look up the results of a pack's samples; see :class:`FirstPassRunner`."""
        return [{**mb, **{name: of_all[mb["samples"]] for name, of_all in self._table.items()}} for mb in pack]


@dataclass(frozen=True)
class GroupRanks:
    """Ranks with different samples in a first pass; see :class:`d9d_core.first_pass.DataRanks`.

    Attributes:
        rank: index of this rank among these ranks.
        ranks: number of ranks.
        group: process group of the ranks; ``None`` for a single rank.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup | None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Concatenate the tensors [n, ...] of all ranks to [ranks * n, ...]. Collective over the group."""
        if self.group is None or self.ranks == 1:
            return tensor
        gathered = tensor.new_empty(self.ranks * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum the tensors of all ranks in place. Collective over the group."""
        if self.group is not None and self.ranks > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

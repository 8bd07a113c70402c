"""First pass over a pack: a forward without gradients, whose results the loss needs."""

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
    """Runner of first passes."""

    def __call__(self, pack: Pack, step: int | None) -> Pack:
        """Pack whose microbatches have what the first pass adds. Collective over all ranks.

        Args:
            pack: microbatches on the device.
            step: 0-based; ``None`` in an evaluation.
        """
        ...


def no_first_pass(pack: Pack, step: int | None) -> Pack:  # noqa: ARG001 - see FirstPassRunner
    """Pack as it is, for tasks that need no first pass."""
    return pack


class FirstForward:
    """First pass over a pack: a forward over all its microbatches, before the one that is trained.

    Args:
        task: says what is kept, and what becomes of it.
        executor: runs the model.
        around: the state that the model is in meanwhile, such as evaluation mode.
        ranks: the ranks that see other samples.
        draws: make the draws of the training step, if there is one.
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
        """Tensors kept of each microbatch, in order; none on ranks without the last stage. Collective over ``pp``."""
        kept: dict[int, Mapping[str, Tensor]] = {}

        def keep(outputs: Mapping[str, Tensor], microbatch: Microbatch) -> None:
            kept[id(microbatch)] = self._task.first_outputs(outputs, microbatch)

        with self._around():
            self._executor.evaluate(pack, keep, step if self._draws else None)
        return [kept[id(microbatch)] for microbatch in pack] if kept else []

    def __call__(self, pack: Pack, step: int | None) -> Pack:
        """Run the pass; see :class:`FirstPassRunner`."""
        kept = self.outputs(pack, step)
        if not kept:
            return pack
        added = self._task.complete(kept, self._ranks)
        return [{**microbatch, **more} for microbatch, more in zip(pack, added, strict=True)]


class StoredOutputs:
    """Results of a first pass over a whole dataset, looked up by the numbers of samples.

    Args:
        table: tensors [samples, ...] on the device, by name.
    """

    def __init__(self, table: Mapping[str, Tensor]) -> None:
        self._table = table

    def __call__(self, pack: Pack, step: int | None) -> Pack:  # noqa: ARG002
        """Look the samples of a pack up; see :class:`FirstPassRunner`."""
        return [{**mb, **{name: of_all[mb["samples"]] for name, of_all in self._table.items()}} for mb in pack]


@dataclass(frozen=True)
class GroupRanks:
    """Ranks of a first pass that see different samples; see :class:`d9d_core.first_pass.DataRanks`.

    Attributes:
        rank: number of this rank among them.
        ranks: how many there are.
        group: them as a process group; ``None`` if there is one.
    """

    rank: int
    ranks: int
    group: dist.ProcessGroup | None

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Tensors of all ranks, [n, ...] each, in a row: [ranks * n, ...]. Collective over the group."""
        if self.group is None or self.ranks == 1:
            return tensor
        gathered = tensor.new_empty(self.ranks * len(tensor), *tensor.shape[1:])
        dist.all_gather_into_tensor(gathered, tensor.contiguous(), group=self.group)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum of the ranks' tensors, in place. Collective over the group."""
        if self.group is not None and self.ranks > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

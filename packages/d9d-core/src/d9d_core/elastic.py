"""Elastic replicas: whole runs, each in a world of its own, that share the microbatches of each step.

Start here: a strategy returns :class:`ElasticReplicas` in :attr:`d9d_core.strategy.Applied.elastic`. Each replica reads
the whole batch of a step and runs a part of its microbatches:

1. ``meet`` agrees on the replicas of this attempt; a replica that is behind takes the state of another one.
2. The replica runs the microbatches of its :meth:`Attempt.share`.
3. ``reduce`` sums gradients, then losses, states of metrics and tallies, over the replicas.
4. If ``commit`` returns true, all replicas take the optimizer step; otherwise they undo the attempt and meet again,
   with the same microbatches.

So a batch never depends on the number of replicas, and each sample is in exactly one committed step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from d9d_core.types import State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Attempt", "ElasticReplicas", "LiveState"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """Attempt at a step: the replicas that share its microbatches, and the index of this replica.

    Attributes:
        index: index of this replica; it runs the microbatches m of each rank with ``m % count == index``.
        replicas: names of the replicas, in the order of their indices.
        key: text that is equal in all replicas of this attempt; an attempt of another set of replicas has another key.
        source: name of the replica whose state this one has just taken; ``None`` if it kept its own.
    """

    index: int
    replicas: tuple[str, ...]
    key: str
    source: str | None = None

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    def share(self, microbatches: int) -> range:
        """Indices of the microbatches that this replica runs, out of a number of microbatches; may be empty."""
        return range(self.index, microbatches, self.count)


class LiveState(Protocol):
    """State of a run between two steps, which another replica may take over."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors of this rank by name: the local shard of every tensor that a checkpoint holds.

        Parameters and optimizer state are not copied; they change after the next commit. All other tensors are
        copies.
        """
        ...

    def values(self) -> State:
        """JSON values of the run: the step, the position in the data, counters, states of subscribers."""
        ...

    def stops(self) -> bool:
        """Whether this replica was asked to stop."""
        ...

    def take(self, values: State, tensors: Mapping[str, Tensor]) -> None:
        """Continue from another replica's state.

        Args:
            values: values of the other replica.
            tensors: tensors of the same rank of the other replica, with the names, shapes and dtypes of
                :meth:`tensors`, in host memory.

        Raises:
            TrainingError: the other replica trains another job.
        """
        ...


class ElasticReplicas(Protocol):
    """Replicas of a whole run that share each step, for :attr:`d9d_core.strategy.Applied.elastic`.

    All calls are collective over the ranks of this replica's world. A replica that ends or fails must not make
    :meth:`reduce` wait without limit.
    """

    def meet(self, step: int, live: LiveState) -> Attempt | None:
        """Agree with the other replicas on the next attempt at a step; wait until enough replicas are there.

        If this replica is behind, or its state may differ, it takes another replica's state (:meth:`LiveState.take`).
        It offers its own state, until the next commit, to replicas that need it.

        Args:
            step: number of steps that this replica has done.
            live: state of this replica.

        Returns:
            The attempt; ``None`` if this replica was asked to stop (:meth:`LiveState.stops`).

        Raises:
            TrainingError: too few replicas came in time, or the replicas do not fit together.
        """
        ...

    def reduce(self, tensors: Sequence[Tensor], operation: Literal["sum", "max", "min"]) -> None:
        """Reduce tensors in place over the same rank of all replicas of the attempt.

        Shapes and dtypes are equal in all replicas. If a replica is lost, the tensors become meaningless, nothing is
        raised, and :meth:`commit` returns false.
        """
        ...

    def commit(self) -> bool:
        """Whether all ranks of all replicas have the results of all reductions, so that the step may change the state.

        If false, the caller undoes the attempt. If true, other replicas no longer read the state that this one offered.
        """
        ...

    def close(self) -> None:
        """Leave the other replicas, which then go on without this one."""
        ...

"""Metrics: distributed statistics whose state can be merged over ranks and saved.

Start here: :class:`Metric`, which :class:`d9d_core.accumulators.AccumulatedMetric` implements except for ``update`` and
``compute``::

    import torch
    from d9d_core.accumulators import AccumulatedMetric, Accumulator

    class Hits(AccumulatedMetric):
        def __init__(self, config):
            super().__init__(hits=Accumulator(dtype=torch.int64), samples=Accumulator(dtype=torch.int64))

        def update(self, observations):
            hits = observations["class_logits"].argmax(-1) == observations["labels"]
            self.accumulate(hits=hits.sum(), samples=hits.numel())

        def compute(self):
            return {"hits": self["hits"] / self["samples"]}

A :class:`StageMetric` reads tallies, which are sums that modules of the model count in their forward, such as tokens
per expert, instead of a task's observations.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ChoosesObservations", "Metric", "StageMetric", "Table", "Vector"]


@dataclass(frozen=True, slots=True)
class Table:
    """Matrix that a metric logs, such as the load of each expert of each layer.

    Attributes:
        values: [rows, columns]; NaN for missing values.
        row: meaning of a row, for example ``layer``.
        column: meaning of a column.
        unit: unit or meaning of a value.
        neutral: value at the middle of a colour scale; ``None`` if there is no such value.
        rows: names of the rows, for example layer numbers; empty to count rows from 0.

    Raises:
        ValueError: the number of names differs from the number of rows.
    """

    values: Tensor
    row: str = "row"
    column: str = "column"
    unit: str = "value"
    neutral: float | None = None
    rows: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rows and len(self.rows) != len(self.values):
            raise ValueError(
                f"a table of {len(self.values)} rows has {len(self.rows)} names for them; name each row or none"
            )


@dataclass(frozen=True, slots=True)
class Vector:
    """Vector of named values that a metric logs; each value is logged as a series ``<series>/<name>``.

    A plain 1-D tensor is logged in the same way, with indices from 0 as names.

    Attributes:
        values: [N]; N is the same in every logging interval.
        names: names of the values, all different.

    Raises:
        ValueError: ``values`` is not 1-D, the number of names differs from the number of values, or a name is repeated.
    """

    values: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or len(self.names) != len(self.values):
            raise ValueError(
                f"a vector has shape {list(self.values.shape)} and {len(self.names)} names; give one dimension, and a "
                "name for each value"
            )
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"several values of a vector are named {', '.join(twice)}; give each a different name")


class Metric(Protocol):
    """Protocol of a metric: a statistic whose state can be merged over ranks and saved."""

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """State name -> reduction over ranks."""
        ...

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Accumulate one microbatch, on the device, without synchronization."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Accumulated state. Names, shapes and dtypes are fixed at construction, so that a state can be loaded."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Replace the state by a merged or saved state, on the device of the given tensors."""
        ...

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        """Values of the present state, as device tensors: series name -> 0-d tensor, 1-D tensor, vector or table.

        On a GPU, this may run on another stream than the updates, in a separate instance of the metric that only loads
        merged states.
        """
        ...

    def reset(self) -> None:
        """Reset the state to its initial values, for the next interval."""
        ...


@runtime_checkable
class StageMetric(Protocol):
    """Metric over the tallies that a model's modules count in their forward (:class:`d9d_core.traits.HasTallies`).

    Its ``update`` receives tallies instead of the task's observations: ``"<module name>/<tally>"`` -> tensor. Each call
    has the tallies of one microbatch in one pipeline stage.
    """

    def attach(self, stage: nn.Module) -> None:
        """Give the metric its final state shapes, from the full model. Called once, before other methods.

        Stages of other pipeline ranks are on the meta device.

        Raises:
            BuildError: the model has no tallies that the metric reads.
        """
        ...


@runtime_checkable
class ChoosesObservations(Protocol):
    """Config of a metric whose fields choose the observations to read; replaces its record's ``reads``."""

    @property
    def reads(self) -> Set[str]:
        """Names of the task's observations that the metric requires."""
        ...

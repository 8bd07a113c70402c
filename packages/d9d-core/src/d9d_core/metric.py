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

A :class:`StageMetric` reads the model's modules in place of a task's observations.
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
    """Table of a metric: a logged value with two dimensions, such as the load of each expert of each layer.

    Attributes:
        values: [rows, columns]; NaN where there is nothing.
        row: what a row is, for example ``layer``.
        column: what a column is.
        unit: what a value is.
        neutral: the value in the middle of a picture's colours; ``None`` if there is no such value.
        rows: what each row is called, for example the number of its layer; empty if they are counted from 0.

    Raises:
        ValueError: there are names, but not one for each row.
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
                f"a table of {len(self.values)} rows has {len(self.rows)} names for them; name each or none"
            )


@dataclass(frozen=True, slots=True)
class Vector:
    """Vector of a metric with names: logged as one series for each of its values, ``<series>/<name>``.

    A plain 1-D tensor is logged in the same way, its values counted from 0.

    Attributes:
        values: [N]; N is the same in every period.
        names: the names of the values, all different.

    Raises:
        ValueError: there is not one name for each value, or a name twice.
    """

    values: Tensor
    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.values.ndim != 1 or len(self.names) != len(self.values):
            raise ValueError(
                f"a vector of shape {list(self.values.shape)} has {len(self.names)} names; give one for each value"
            )
        if twice := sorted({name for name in self.names if self.names.count(name) > 1}):
            raise ValueError(f"several values of a vector are named {', '.join(twice)}; give each a name of its own")


class Metric(Protocol):
    """Protocol of a metric: a statistic whose state can be merged over ranks and saved."""

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """Reductions of the states over ranks, by state name."""
        ...

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Take in one microbatch, on the device, without waiting for it."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Accumulated state. Names, shapes and dtypes are the same from construction on: it is loaded into."""
        ...

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a (merged or saved) state, on the device where it is."""
        ...

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        """Values of the present state, as device tensors: series name -> 0-d value, 1-D values (or a vector) or table.

        On a GPU this may run on another stream than the updates, in an instance of the metric that is never updated and
        loads merged states only.
        """
        ...

    def reset(self) -> None:
        """Reset the state to that of an empty period."""
        ...


@runtime_checkable
class StageMetric(Protocol):
    """A metric over what a model's modules tally (:class:`d9d_core.traits.HasTallies`).

    In place of what the task observes, it takes in each tally of a microbatch as ``"<module name>/<tally>"``: those of
    one pipeline stage at a time.
    """

    def attach(self, stage: nn.Module) -> None:
        """Look at the full model, once and before anything else, so that the state has its final shapes.

        Stages of other pipeline ranks are on the meta device.

        Raises:
            BuildError: the model has nothing to observe.
        """
        ...


@runtime_checkable
class ChoosesObservations(Protocol):
    """Config of a metric whose fields name the observations that it reads, in place of its record's ``reads``."""

    @property
    def reads(self) -> Set[str]:
        """Names of the task's observations that the metric cannot do without."""
        ...

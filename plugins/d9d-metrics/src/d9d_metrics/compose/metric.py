"""Metric ``compose``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from d9d_core.errors import JobError
from d9d_core.metric import Metric, StageMetric, Table, Vector
from torch import Tensor

from d9d_metrics.compose.config import ComposeConfig


class Compose:
    """Metric composed of several metrics; each call is passed to all these metrics.

    Args:
        config: config with the children's configs, by name.
        build: function that builds a child from its config.

    Raises:
        JobError: a child reads tallies (counts that modules such as routers keep), which only the metrics listed
            directly in the job get.
    """

    def __init__(self, config: ComposeConfig, build: Callable[[Any], Metric]) -> None:
        self.children = {name: build(child) for name, child in config.metrics.items()}
        for name, child in self.children.items():
            if isinstance(child, StageMetric):
                raise JobError(
                    f"metrics: compose.metrics.{name}: {config.metrics[name].selector} reads tallies of modules, "
                    "which only the job's own metrics get; move it to the job's 'metrics'"
                )

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """Reductions of all children, by ``<child>.<state>``."""
        return {f"{name}.{key}": how for name, child in self.children.items() for key, how in child.reductions.items()}

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Update every child."""
        for child in self.children.values():
            child.update(observations)

    def state(self) -> dict[str, Tensor]:
        """States of all children, by ``<child>.<state>``."""
        return {
            f"{name}.{key}": tensor for name, child in self.children.items() for key, tensor in child.state().items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of every child."""
        for name, child in self.children.items():
            child.load_state({key: state[f"{name}.{key}"] for key in child.state()})

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        """Series of all children, by ``<child>/<series>``."""
        return {
            f"{name}/{key}": value for name, child in self.children.items() for key, value in child.compute().items()
        }

    def reset(self) -> None:
        """Reset every child."""
        for child in self.children.values():
            child.reset()

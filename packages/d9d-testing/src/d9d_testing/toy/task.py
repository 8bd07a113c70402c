"""The toy task and metric."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from d9d_core.errors import DataError
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from d9d_testing.toy.config import ToyMetricConfig, ToyTaskConfig


class ToyTask:
    """Task: squared error over unmasked samples; optionally the mean squared output over all samples."""

    def __init__(self, config: ToyTaskConfig) -> None:
        self._decay = config.decay

    @property
    def coefficients(self) -> Mapping[str, float]:
        """Coefficients of one or two loss terms."""
        return {"error": 1.0} | ({"decay": self._decay} if self._decay else {})

    def check(self, model: Any, facts: State) -> None:
        """Check that data and model have the same number of features."""
        features = facts.get("features", model.features)
        if model.features != features:
            raise DataError(
                f"the data has {features} features, but model.features is {model.features}; set both to one number"
            )

    def count(self, microbatch: Microbatch) -> int:
        """Number of samples."""
        return len(microbatch["x"])

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Weights of the loss terms: number of unmasked samples, and number of all samples."""
        return {"error": microbatch["mask"].sum(), "decay": torch.ones_like(microbatch["mask"]).sum()}

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        """Features for the first stage."""
        return StageInputs(first={"x": microbatch["x"]})

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Sum of each loss term over the samples."""
        error = (outputs["y"] - microbatch["y"]).float().square().mean(-1) * microbatch["mask"]
        return {"error": error.sum(), "decay": outputs["y"].float().square().mean(-1).sum()}

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        """Observation for the toy metric: the absolute error of each output."""
        return {"absolute": (outputs["y"].detach() - microbatch["y"]).abs()}


class ToyMetric:
    """Metric of the toy task: mean absolute error."""

    def __init__(self, _config: ToyMetricConfig) -> None:
        self._sum = torch.zeros((), dtype=torch.float64)
        self._count = torch.zeros((), dtype=torch.float64)

    @property
    def reductions(self) -> Mapping[str, Literal["sum", "max", "min"]]:
        """Reduction of both states over ranks: sum."""
        return {"sum": "sum", "count": "sum"}

    def update(self, observations: Mapping[str, Tensor]) -> None:
        """Add one microbatch."""
        values = observations["absolute"]
        self._sum = self._sum.to(values.device) + values.sum().double()
        self._count = self._count.to(values.device) + values.numel()

    def state(self) -> dict[str, Tensor]:
        """Sum and count of errors."""
        return {"sum": self._sum, "count": self._count}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self._sum, self._count = state["sum"], state["count"]

    def compute(self) -> Mapping[str, Tensor]:
        """Mean error; zero before the first update."""
        return {"absolute_error": self._sum / self._count.clamp(min=1)}

    def reset(self) -> None:
        """Set sum and count to zero."""
        self._sum = torch.zeros_like(self._sum)
        self._count = torch.zeros_like(self._count)

"""Task with two loss terms, a state and hyperparameters."""

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.errors import DataError
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from torch import Tensor

from frozen_api_2.config import RegressionConfig


class Regression:
    def __init__(self, config: RegressionConfig) -> None:
        self.decay = config.decay
        self.steps = 0

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {"error": 1.0} | ({"decay": self.decay} if self.decay else {})

    def check(self, model: Any, facts: State) -> None:
        if facts.get("width", model.width) != model.width:
            raise DataError(f"the data has width {facts['width']}, the model {model.width}")

    def count(self, microbatch: Microbatch) -> int:
        return len(microbatch["x"])

    def weights(self, microbatch: Microbatch) -> Mapping[str, Tensor]:
        samples = torch.tensor(float(len(microbatch["x"])), device=microbatch["x"].device)
        return dict.fromkeys(self.coefficients, samples)

    def inputs(self, microbatch: Microbatch) -> StageInputs:
        return StageInputs(first={"x": microbatch["x"]}, kept={"target": microbatch["y"]})

    def losses(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        terms = {"error": (outputs["y"] - outputs["target"]).float().square().mean(-1).sum()}
        return terms | ({"decay": outputs["y"].float().square().mean(-1).sum()} if self.decay else {})

    def observations(self, outputs: Mapping[str, Tensor], microbatch: Microbatch) -> Mapping[str, Tensor]:
        return {"error": (outputs["y"].detach() - microbatch["y"]).abs()}

    def begin_step(self, step: int) -> None:
        self.steps = step

    def state(self) -> State:
        return {"steps": self.steps}

    def load_state(self, state: State) -> None:
        assert isinstance(state["steps"], int)
        self.steps = state["steps"]

    def hparams(self) -> State:
        return {"terms": len(self.coefficients)}

"""Tasks with one fault each, over the toy task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.task import StageInputs
from d9d_core.types import Microbatch, State
from d9d_testing.suites.task import TaskSuite
from d9d_testing.toy.config import ToyTaskConfig
from d9d_testing.toy.task import ToyTask
from torch import Tensor

Tensors = Mapping[str, Tensor]


class MeansOfMicrobatches(ToyTask):
    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return {name: loss / len(microbatch["x"]) for name, loss in super().losses(outputs, microbatch).items()}


class WeighsWhatDoesNotCount(ToyTask):
    def weights(self, microbatch: Microbatch) -> Tensors:
        count = torch.ones_like(microbatch["mask"]).sum()
        return {"error": count, "decay": count}


class SumsWhatDoesNotCount(ToyTask):
    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return super().losses(outputs, {**microbatch, "mask": torch.ones_like(microbatch["mask"])})


class DividesByTheCount(ToyTask):
    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        sums = dict(super().losses(outputs, microbatch))
        count = microbatch["mask"].sum()
        return {**sums, "error": sums["error"] / count * count}


class WeighsOneTermOnly(ToyTask):
    def weights(self, microbatch: Microbatch) -> Tensors:
        return {"error": super().weights(microbatch)["error"]}


class ForgetsATerm(ToyTask):
    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return {"error": super().losses(outputs, microbatch)["error"]}


class ConstantWeight(ToyTask):
    def weights(self, microbatch: Microbatch) -> Tensors:
        return {name: torch.ones(()) for name in super().weights(microbatch)}


class WeighsWithTheLastLoss(ToyTask):
    last = 1.0

    def weights(self, microbatch: Microbatch) -> Tensors:
        return {name: weight * self.last for name, weight in super().weights(microbatch).items()}

    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        self.last = 2.0
        return super().losses(outputs, microbatch)


class DetachesItsLoss(ToyTask):
    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return {name: loss.detach() for name, loss in super().losses(outputs, microbatch).items()}


class WideLoss(ToyTask):
    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return {name: loss.double() for name, loss in super().losses(outputs, microbatch).items()}


class CountsOnTheHost(ToyTask):
    def weights(self, microbatch: Microbatch) -> Tensors:
        return {**super().weights(microbatch), "error": torch.tensor(microbatch["mask"].sum().item())}


class WeighsOnTheHost(ToyTask):
    def weights(self, microbatch: Microbatch) -> Tensors:
        return super().weights({**microbatch, "mask": torch.as_tensor(microbatch["mask"].numpy())})


class CountsByValue(ToyTask):
    def count(self, microbatch: Microbatch) -> int:
        return int(microbatch["mask"].sum())


class ObservesAGraph(ToyTask):
    def observations(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return {"absolute": (outputs["y"] - microbatch["y"]).abs()}


class ObservesSometimes(ToyTask):
    def observations(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return super().observations(outputs, microbatch) if len(microbatch["x"]) > 1 else {}


class ObservesSomethingElse(ToyTask):
    def observations(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return {"error": super().observations(outputs, microbatch)["absolute"]}


class WritesIntoTheMicrobatch(ToyTask):
    def inputs(self, microbatch: Microbatch) -> StageInputs:
        return StageInputs(first={"x": microbatch["x"].mul_(2)})


class TakesEverything(ToyTask):
    def check(self, model: Any, facts: State) -> None:
        pass


class NeedsFacts(ToyTask):
    def check(self, model: Any, facts: State) -> None:
        super().check(model, {"features": facts["features"]})


class NeedsLessThanItsRecordReads(ToyTask):
    def weights(self, microbatch: Microbatch) -> Tensors:
        return super().weights(self.whole(microbatch))

    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        return super().losses(outputs, self.whole(microbatch))

    def whole(self, microbatch: Microbatch) -> Microbatch:
        return {"mask": torch.ones(len(microbatch["x"])), **microbatch}


class CountsItsSteps(ToyTask):
    """A coefficient that halves with each call of begin_step(), and no state."""

    steps = 0

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {**super().coefficients, "decay": 0.1 * 0.5**self.steps}

    def begin_step(self, step: int) -> None:
        self.steps += 1


class ForgetsItsCoefficient(CountsItsSteps):
    """A coefficient that halves with each step; load_state() is empty."""

    def state(self) -> State:
        return {"steps": self.steps}

    def load_state(self, state: State) -> None:
        pass


class SumsNarrowly(ToyTask):
    """Squares and sums in the dtype of the outputs."""

    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        error = (outputs["y"] - microbatch["y"].to(outputs["y"].dtype)).square().mean(-1)
        decay = outputs["y"].square().mean(-1).sum()
        return {"error": (error * microbatch["mask"].to(error.dtype)).sum().float(), "decay": decay.float()}


class KeepsItsLosses(ToyTask):
    """Keeps each loss with its graph, for an average."""

    def __init__(self, config: ToyTaskConfig) -> None:
        super().__init__(config)
        self.history: list[Tensor] = []

    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        losses = super().losses(outputs, microbatch)
        self.history.append(losses["error"])
        return losses


class Sound(TaskSuite):
    target = "toy_task"
    plugin = "d9d_testing.toy.plugin"
    observes = ("absolute",)
    accepts = ({"features": 4}, {"features": 4})
    rejects = (({"features": 4}, {"features": 6}),)
    made_of: type[ToyTask] = ToyTask

    def build(self, *arguments: Any, **fields: Any) -> ToyTask:
        return self.made_of(ToyTaskConfig(decay=0.1))


FAULTS = {
    "means of microbatches": ({"made_of": MeansOfMicrobatches}, "(sum, no mean)"),
    "weighs what does not count": ({"made_of": WeighsWhatDoesNotCount}, "exactly the samples or positions"),
    "sums what does not count": ({"made_of": SumsWhatDoesNotCount}, "exactly the samples or positions"),
    "divides by zero where nothing counts": ({"made_of": DividesByTheCount}, ""),
    "a term has no weight": ({"made_of": WeighsOneTermOnly}, "weights() lacks ['decay']"),
    "a term has no loss": ({"made_of": ForgetsATerm}, ""),
    "weight is constant": ({"made_of": ConstantWeight}, ""),
    "weight depends on a loss": ({"made_of": WeighsWithTheLastLoss}, "gives other values after losses()"),
    "losses are detached": ({"made_of": DetachesItsLoss}, ""),
    "losses are float64": ({"made_of": WideLoss}, "return a 0-d float32"),
    "weights are read on the host": ({"made_of": CountsOnTheHost}, "reads values on the host"),
    "weights are computed by NumPy": ({"made_of": WeighsOnTheHost}, "reads values on the host (numpy)"),
    "counts by value": ({"made_of": CountsByValue}, ""),
    "observes with a graph": ({"made_of": ObservesAGraph}, "carries a graph"),
    "observes sometimes": ({"made_of": ObservesSometimes}, "different names"),
    "observes something else": ({"made_of": ObservesSomethingElse}, "declared ['absolute']"),
    "writes into the microbatch": ({"made_of": WritesIntoTheMicrobatch}, "writes into ['x']"),
    "needs less than its record reads": ({"made_of": NeedsLessThanItsRecordReads}, "works without mask"),
    "forgets its state": ({"made_of": ForgetsItsCoefficient}, ""),
    "counts its steps": ({"made_of": CountsItsSteps}, ""),
    "sums in the dtype of the outputs": ({"made_of": SumsNarrowly}, ""),
    "keeps its losses": ({"made_of": KeepsItsLosses}, ""),
    "check takes everything": ({"made_of": TakesEverything}, "DID NOT RAISE"),
    "check needs facts": ({"made_of": NeedsFacts}, "KeyError"),
}

"""Metrics with one fault each: a mean, a maximum and a count of a task's observations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from d9d_core.metric import Table, Vector
from d9d_testing.suites.metric import MetricSuite
from torch import Tensor


class Statistics:
    """Mean and largest absolute error."""

    reductions: Mapping[str, str] = {"sum": "sum", "count": "sum", "largest": "max"}

    def __init__(self) -> None:
        self.values = {
            "sum": torch.zeros((), dtype=torch.float64),
            "count": torch.zeros((), dtype=torch.float64),
            "largest": torch.zeros((), dtype=torch.float64),
        }

    def update(self, observations: Mapping[str, Tensor]) -> None:
        seen = observations["absolute"].double()
        self.values = {
            "sum": self.values["sum"] + seen.sum(),
            "count": self.values["count"] + seen.numel(),
            "largest": torch.maximum(self.values["largest"], seen.max()),
        }

    def state(self) -> dict[str, Tensor]:
        return dict(self.values)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.values = dict(state)

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        mean = self.values["sum"] / self.values["count"].clamp(min=1)
        largest = self.values["largest"]
        both = Vector(torch.stack([mean, largest]), ("mean", "largest"))
        return {"mean": mean, "largest": largest, "table": Table(mean.reshape(1, 1)), "both": both}

    def reset(self) -> None:
        self.values = {name: torch.zeros_like(value) for name, value in self.values.items()}


class MeanOfMeans(Statistics):
    def update(self, observations: Mapping[str, Tensor]) -> None:
        super().update({"absolute": observations["absolute"].mean().reshape(1)})


class AddsMaxima(Statistics):
    reductions = {"sum": "sum", "count": "sum", "largest": "sum"}


class StartsAtOne(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.values["count"] = torch.ones((), dtype=torch.float64)


class ForgetsToResetTheMaximum(Statistics):
    def reset(self) -> None:
        self.values = {**self.values, "sum": torch.zeros(()).double(), "count": torch.zeros(()).double()}


class RemembersBesideTheState(Statistics):
    seen = 0

    def update(self, observations: Mapping[str, Tensor]) -> None:
        super().update(observations)
        self.seen += 1

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        return {**super().compute(), "updates": torch.tensor(float(self.seen > 1))}


class GrowsItsState(Statistics):
    def __init__(self) -> None:
        super().__init__()
        del self.values["largest"]
        self.first = True

    def update(self, observations: Mapping[str, Tensor]) -> None:
        self.values.setdefault("largest", torch.zeros(()).double())
        super().update(observations)

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        return {"mean": self.values["sum"] / self.values["count"].clamp(min=1)}


class WidensItsState(Statistics):
    def __init__(self) -> None:
        super().__init__()
        self.values = {name: value.float() for name, value in self.values.items()}


class ResetsInCompute(Statistics):
    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        computed = super().compute()
        self.reset()
        return computed


class NamesSeriesByValue(Statistics):
    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        count = self.values["count"].item()
        return {f"mean_of_{count:g}": self.values["sum"] / max(count, 1)}


class ReturnsMatrices(Statistics):
    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        return {"all": torch.stack(list(self.values.values())).reshape(1, -1)}


class LogsClassesThatOccur(Statistics):
    """A vector of as many values as there were samples, up to four."""

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        return {"each": torch.zeros(min(int(self.values["count"]), 4))}


class NamesClassesByValue(Statistics):
    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        return {"all": Vector(self.values["sum"].reshape(1), (f"of {self.values['count']:g}",))}


class CountsInBooleans(Statistics):
    """Whether there was a sample: a state that NCCL does not add."""

    reductions = {**Statistics.reductions, "any": "max"}

    def __init__(self) -> None:
        super().__init__()
        self.values["any"] = torch.zeros((), dtype=torch.bool)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        seen = self.values["any"]
        super().update(observations)
        self.values["any"] = seen | torch.ones_like(seen)


class DividesInPlace(Statistics):
    """Writes the mean into the state, and the sum back."""

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        self.values["sum"].div_(self.values["count"].clamp(min=1))
        return {"mean": self.values["sum"].clone(), "largest": self.values["largest"]}


class ReadsInCompute(Statistics):
    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        count = max(self.values["count"].item(), 1)
        return {"mean": self.values["sum"] / count, "largest": self.values["largest"]}


class ReadsOnTheHost(Statistics):
    def update(self, observations: Mapping[str, Tensor]) -> None:
        if observations["absolute"].max() >= 0:
            super().update(observations)


class SelectsByAMask(Statistics):
    def update(self, observations: Mapping[str, Tensor]) -> None:
        values = observations["absolute"]
        super().update({"absolute": values[values >= 0]})


class WritesIntoObservations(Statistics):
    def update(self, observations: Mapping[str, Tensor]) -> None:
        super().update({"absolute": observations["absolute"].add_(1.0).sub(1.0)})


class LoadsHalf(Statistics):
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.values = {**self.values, "sum": state["sum"], "count": state["count"]}


class UnknownReduction(Statistics):
    reductions = {"sum": "sum", "count": "sum", "largest": "maximum"}


class CountsInFloat32(Statistics):
    """Exact up to 2**24 samples, which takes no suite a second to reach."""

    def __init__(self) -> None:
        super().__init__()
        self.values["count"] = torch.zeros(())


class SumsNarrowly(Statistics):
    """Sums in bfloat16, as the observations are."""

    def __init__(self) -> None:
        super().__init__()
        self.values["sum"] = torch.zeros((), dtype=torch.bfloat16)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        before = self.values["sum"]
        super().update(observations)
        self.values["sum"] = before + observations["absolute"].bfloat16().sum()


class MovingAverage(Statistics):
    """An average over the last updates, which ranks cannot merge."""

    def update(self, observations: Mapping[str, Tensor]) -> None:
        before = self.values
        super().update(observations)
        mean = observations["absolute"].double().sum() / max(observations["absolute"].numel(), 1)
        self.values["sum"] = torch.where(before["count"] > 0, 0.9 * before["sum"] + 0.1 * mean, mean)

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        return {"mean": self.values["sum"], "largest": self.values["largest"]}


class MinimumFromZero(Statistics):
    """The smallest value, which starts from 0 and so is always 0."""

    reductions = {**Statistics.reductions, "smallest": "min"}

    def __init__(self) -> None:
        super().__init__()
        self.values["smallest"] = torch.zeros((), dtype=torch.float64)

    def update(self, observations: Mapping[str, Tensor]) -> None:
        before = self.values["smallest"]
        super().update(observations)
        self.values["smallest"] = torch.minimum(before, observations["absolute"].double().min())

    def compute(self) -> Mapping[str, Tensor | Vector | Table]:
        return {**super().compute(), "smallest": self.values["smallest"].clone()}


class Sound(MetricSuite):
    target = "statistics"
    made_of: type[Statistics] = Statistics

    def build(self, *arguments: Any, **fields: Any) -> Statistics:
        return self.made_of()


FAULTS = {
    "mean of means": ({"made_of": MeanOfMeans}, "in shards of"),
    "adds maxima": ({"made_of": AddsMaxima}, "largest is"),
    "starts from one": ({"made_of": StartsAtOne}, ""),
    "forgets to reset a value": ({"made_of": ForgetsToResetTheMaximum}, ""),
    "remembers beside the state": ({"made_of": RemembersBesideTheState}, ""),
    "state grows with the first update": ({"made_of": GrowsItsState}, ""),
    "state changes its dtype": ({"made_of": WidensItsState}, "it must not change form"),
    "computing resets": ({"made_of": ResetsInCompute}, ""),
    "series are named by value": ({"made_of": NamesSeriesByValue}, ""),
    "values are matrices": ({"made_of": ReturnsMatrices}, "return 0-d or 1-D tensors"),
    "a series for each class that occurs": ({"made_of": LogsClassesThatOccur}, "keep all of them"),
    "names of classes change": ({"made_of": NamesClassesByValue}, "keep all of them"),
    "state of booleans": ({"made_of": CountsInBooleans}, "cannot be reduced by every backend"),
    "computing writes into the state": ({"made_of": DividesInPlace}, "must not change anything"),
    "computing reads on the host": ({"made_of": ReadsInCompute}, "waits for the device"),
    "reads values on the host": ({"made_of": ReadsOnTheHost}, "reads values on the host"),
    "selects values by a mask": ({"made_of": SelectsByAMask}, "reads values on the host (aten::index)"),
    "writes into observations": ({"made_of": WritesIntoObservations}, ""),
    "loads half of the state": ({"made_of": LoadsHalf}, ""),
    "counts in float32": ({"made_of": CountsInFloat32}, ""),
    "sums in bfloat16": ({"made_of": SumsNarrowly}, ""),
    "keeps a moving average": ({"made_of": MovingAverage}, ""),
    "a minimum starts from zero": ({"made_of": MinimumFromZero}, ""),
    "unknown reduction": ({"made_of": UnknownReduction}, ""),
}

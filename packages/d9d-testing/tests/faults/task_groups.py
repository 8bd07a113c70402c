"""Tasks whose samples come in pairs, with one fault each: of two samples, the second one should have the larger sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from d9d_core.types import Microbatch
from d9d_testing.suites.task import TaskSuite
from d9d_testing.toy.config import ToyTaskConfig
from d9d_testing.toy.task import ToyTask
from torch import Tensor
from torch.nn.functional import softplus

Tensors = Mapping[str, Tensor]


class Pairs(ToyTask):
    """Sound: samples 2 i and 2 i + 1 are a pair, which counts if both samples do."""

    def split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        return tensor[0::2], tensor[1::2]

    def counted(self, mask: Tensor) -> Tensor:
        first, second = self.split(mask)
        return first * second

    def weights(self, microbatch: Microbatch) -> Tensors:
        return {"pairs": self.counted(microbatch["mask"]).sum()}

    @property
    def coefficients(self) -> Mapping[str, float]:
        return {"pairs": 1.0}

    def losses(self, outputs: Tensors, microbatch: Microbatch) -> Tensors:
        made, wanted = (self.split(of["y"].float().sum(-1)) for of in (outputs, microbatch))
        loss = softplus((made[0] - made[1]) * (wanted[1] - wanted[0]))
        return {"pairs": (loss * self.counted(microbatch["mask"])).sum()}


class PairsHalves(Pairs):
    """Sample i is compared with sample i + B / 2."""

    def split(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        half = len(tensor) // 2
        return tensor[:half], tensor[half:]


class WeighsSamples(Pairs):
    """The weight counts samples, of which a pair has two."""

    def weights(self, microbatch: Microbatch) -> Tensors:
        return {"pairs": microbatch["mask"].sum()}


class CountsHalfPairs(Pairs):
    """A pair weighs something if one of its samples counts; its loss needs both."""

    def weights(self, microbatch: Microbatch) -> Tensors:
        first, second = self.split(microbatch["mask"])
        return {"pairs": first.maximum(second).sum()}


class Sound(TaskSuite):
    target = "toy_task"
    plugin = "d9d_testing.toy.plugin"
    observes = ("absolute",)
    accepts = ({"features": 4}, {"features": 4})
    rejects = (({"features": 4}, {"features": 6}),)
    group = 2
    made_of: type[Pairs] = Pairs

    def build(self, *arguments: Any, **fields: Any) -> Pairs:
        return self.made_of(ToyTaskConfig())


FAULTS = {
    "pairs the halves of a microbatch": ({"made_of": PairsHalves}, ""),
    "weighs samples where pairs are summed": ({"made_of": WeighsSamples}, ""),
    "weighs half pairs": ({"made_of": CountsHalfPairs}, ""),
}

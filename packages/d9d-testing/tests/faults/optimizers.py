"""Optimizers with one fault each. A single-file plugin, so that the ranks of a world find them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from d9d_core.config import PluginConfig
from d9d_core.plugin import OptimizerSpec, Ref, hookimpl
from d9d_core.tensors import local
from d9d_testing.suites.optimizer import OptimizerSuite
from d9d_testing.toy.config import ToyOptimizerConfig
from d9d_testing.toy.optimizer import ToyOptimizer
from torch import Tensor, nn


class FaultyConfig(PluginConfig):
    """Momentum with a fault."""

    name: Literal["faulty"] = "faulty"
    """Selects the optimizer."""
    fault: str = ""
    """Fault of the optimizer."""


class Faulty(ToyOptimizer):
    """The toy optimizer; subclasses break it."""

    def __init__(self, config: FaultyConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(ToyOptimizerConfig(), parameters)


class IgnoresTheGate(Faulty):
    def step(self, gate: Tensor) -> None:
        super().step(torch.ones_like(gate))


class MultipliesByTheGate(Faulty):
    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        for name, p in self._parameters.items():
            if p.grad is not None:
                old = local(self._momentum[name])
                old.copy_(torch.where(gate, 0.9 * old + local(p.grad), old))
                local(p).sub_(self._lr * gate * (old + 0 * local(p.grad)))


class UpdatesStateBehindAClosedGate(Faulty):
    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        super().step(gate)
        for name, p in self._parameters.items():
            if p.grad is not None:
                local(self._momentum[name]).mul_(torch.where(gate, 1.0, 0.5))


class CountsRefusedSteps(Faulty):
    calls = 0

    def step(self, gate: Tensor) -> None:
        self.calls += 1
        self._lr = self._base / self.calls**0.5
        super().step(gate)


class RemembersOutsideOfTheState(Faulty):
    """Counts taken steps on the host."""

    def __init__(self, config: FaultyConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(config, parameters)
        self._taken = torch.zeros(())

    def step(self, gate: Tensor) -> None:
        before = self._lr
        self._taken += gate.cpu() if gate.device != self._taken.device else gate
        self._lr = before / (1 + self._taken)  # type: ignore[assignment]
        super().step(gate)
        self._lr = before


class ReadsTheGate(Faulty):
    def step(self, gate: Tensor) -> None:
        if gate:
            super().step(gate)


class ListsTheGate(Faulty):
    def step(self, gate: Tensor) -> None:
        if gate.tolist():
            super().step(gate)


class NamesStateByPosition(Faulty):
    def state(self) -> Mapping[str, Tensor]:
        return {f"{index}/momentum": tensor for index, tensor in enumerate(self._momentum.values())}


class MakesStateLate(Faulty):
    def init_state(self) -> None:
        self._momentum = {}

    def step(self, gate: Tensor) -> None:
        for name, p in self._parameters.items():
            self._momentum.setdefault(name, torch.zeros_like(p))
        super().step(gate)


class GivesOutCopies(Faulty):
    def state(self) -> Mapping[str, Tensor]:
        return {name: tensor.clone() for name, tensor in super().state().items()}


class IgnoresTheFactor(Faulty):
    def set_lr_factor(self, factor: float) -> None:
        pass


class FactorsAddUp(Faulty):
    def set_lr_factor(self, factor: float) -> None:
        self._lr *= factor


class ForgetsTheFactorOfVectors(Faulty):
    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        lr = self._lr
        everything = self._parameters
        for rate, kept in ((lr, True), (self._base, False)):
            self._lr = rate
            self._parameters = {n: p for n, p in everything.items() if (p.ndim > 1) == kept}
            super().step(gate)
        self._parameters, self._lr = everything, lr


class UpdatesTheLastParameterTwice(Faulty):
    """Of those with a gradient, one without counts too."""

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        for p in self._parameters.values():
            if p.grad is None and not p.is_meta:
                p.sub_(0.01)
        super().step(gate)


class AllocatesStateOfOtherRanks(Faulty):
    def init_state(self) -> None:
        super().init_state()
        self._momentum = {n: torch.zeros(t.shape, dtype=t.dtype) if t.is_meta else t for n, t in self._momentum.items()}


class NormalisesByTheLocalShard(Faulty):
    """A norm over the local shard: other numbers for every layout."""

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        for p in self._parameters.values():
            if p.grad is not None:
                here = local(p.grad)
                here.div_(here.norm() + 1e-6)
        super().step(gate)


class DescribesWithTensors(Faulty):
    def describe(self) -> Mapping[str, Any]:
        return {"all": {"parameters": list(self._parameters), "lr": torch.tensor(self._base)}}


class NarrowsState(Faulty):
    def init_state(self) -> None:
        self._momentum = {n: torch.zeros_like(p, dtype=torch.bfloat16) for n, p in self._parameters.items()}

    @torch.no_grad()
    def step(self, gate: Tensor) -> None:
        super().step(gate)
        self._momentum = {n: t.to(self._parameters[n].dtype) for n, t in self._momentum.items()}


class DividesLaterStepsToo(Faulty):
    divisor: Tensor | None = None

    def divide_gradients(self, divisor: Tensor) -> None:
        self.divisor = divisor

    def step(self, gate: Tensor) -> None:
        if self.divisor is not None:
            for p in self._parameters.values():
                if p.grad is not None:
                    local(p.grad).div_(self.divisor)
        super().step(gate)


class KeepsEvaluationWeights(Faulty):
    """Half of the weights are the average, and they stay it after an exception."""

    average = ("momentum", 0.0)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        for p in self._parameters.values():
            local(p.detach()).mul_(0.5)
        yield
        for p in self._parameters.values():
            local(p.detach()).mul_(2)


class EvaluatesTrainingWeights(Faulty):
    average = ("momentum", 0.0)

    @contextmanager
    def evaluation_weights(self) -> Iterator[None]:
        yield


class DrawsItsInitialState(Faulty):
    """Momentum starts with random numbers of this process."""

    def init_state(self) -> None:
        super().init_state()
        generator = torch.Generator().manual_seed(os.getpid())
        for tensor in self._momentum.values():
            if not tensor.is_meta:
                mine = local(tensor)
                mine.copy_(torch.rand(mine.shape, generator=generator))


class SeedsByHash(Faulty):
    """The rate of a parameter depends on ``hash`` of its name, which is another number in each process."""

    def step(self, gate: Tensor) -> None:
        lr, everything = self._lr, self._parameters
        for name, parameter in everything.items():
            self._lr, self._parameters = lr * (1 + hash(name) % 97 / 97), {name: parameter}
            super().step(gate)
        self._lr, self._parameters = lr, everything


class BoundsEachShard(Faulty):
    """Bounds gradients by their largest number, which an empty shard does not have."""

    def step(self, gate: Tensor) -> None:
        for parameter in self._parameters.values():
            if parameter.grad is not None:
                local(parameter.grad).clamp_(max=local(parameter.grad).amax())
        super().step(gate)


class ReportsTheBaseRate(Faulty):
    @property
    def lr(self) -> float:
        return self._base


class SharesStateByShape(Faulty):
    """Parameters of one shape have one buffer."""

    def init_state(self) -> None:
        super().init_state()
        first: dict[Any, Tensor] = {}
        for name, tensor in self._momentum.items():
            self._momentum[name] = first.setdefault((tensor.shape, tensor.device), tensor)


def build(config: FaultyConfig, parameters: Mapping[str, nn.Parameter]) -> Faulty:
    """The optimizer with the fault."""
    kinds: dict[str, type[Faulty]] = {kind.__name__: kind for kind in Faulty.__subclasses__()}
    return kinds.get(config.fault, Faulty)(config, parameters)


@hookimpl
def d9d_optimizers() -> Iterator[OptimizerSpec]:
    """The faulty one."""
    yield OptimizerSpec(
        name="faulty",
        summary="Momentum with a fault.",
        config=Ref(f"{__name__}:FaultyConfig"),
        build=Ref(f"{__name__}:build"),
    )


class Sound(OptimizerSuite):
    plugin = __file__
    target = "faulty"
    dtypes: ClassVar = ("float32",)


def _fault(kind: Callable[..., Faulty], text: str) -> tuple[dict[str, Any], str]:
    return {"config": {"fault": kind.__name__}}, text


FAULTS = {
    "ignores the gate": _fault(IgnoresTheGate, "a step whose gate is false changes"),
    "multiplies by the gate": _fault(MultipliesByTheGate, "0 * NaN is NaN"),
    "updates state behind a closed gate": _fault(UpdatesStateBehindAClosedGate, "a step whose gate is false changes"),
    "counts refused steps": _fault(CountsRefusedSteps, "change later updates of"),
    "counts steps outside of the state": _fault(RemembersOutsideOfTheState, "state() lacks something"),
    "reads the gate on the host": _fault(ReadsTheGate, "step() reads values on the host"),
    "lists the gate on the host": _fault(ListsTheGate, "step() reads values on the host (tolist)"),
    "names state by position": _fault(NamesStateByPosition, "must be named '<parameter name>/<slot>'"),
    "makes state in the first step": _fault(MakesStateLate, ""),
    "gives out copies of its state": _fault(GivesOutCopies, "copying into state() does not change"),
    "ignores the learning-rate factor": _fault(IgnoresTheFactor, "with a learning-rate factor of 0"),
    "learning-rate factors add up": _fault(FactorsAddUp, "learning-rate factor"),
    "one group ignores the factor": _fault(ForgetsTheFactorOfVectors, "with a learning-rate factor of 0"),
    "changes parameters without a gradient": _fault(UpdatesTheLastParameterTwice, "has no gradient, but"),
    "allocates state of other ranks": _fault(AllocatesStateOfOtherRanks, "are not on the meta device"),
    "takes a shard for the whole": _fault(NormalisesByTheLocalShard, "rank 0 of 2"),
    "expects a row in each shard": _fault(BoundsEachShard, "amax"),
    "describes with tensors": _fault(DescribesWithTensors, "must be JSON values"),
    "divides gradients of later steps too": _fault(DividesLaterStepsToo, "gradients that are divided in the step give"),
    "keeps the weights of an evaluation": _fault(KeepsEvaluationWeights, "evaluation_weights() does not restore"),
    "evaluates the weights of training": _fault(EvaluatesTrainingWeights, "have their training values"),
    "state changes its dtype": _fault(NarrowsState, ""),
    "draws its initial state in each process": _fault(DrawsItsInitialState, ""),
    "seeds by the hash of a name": _fault(SeedsByHash, ""),
    "reports the base rate": _fault(ReportsTheBaseRate, ""),
    "shares state between parameters": _fault(SharesStateByShape, ""),
}

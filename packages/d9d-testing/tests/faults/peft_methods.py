"""Fine-tuning methods with one fault each, over the toy adapter. A single-file plugin: jobs and ranks name it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from d9d_core.config import PluginConfig
from d9d_core.plugin import PeftSpec, Ref, hookimpl
from d9d_testing.suites.peft import PeftSuite
from d9d_testing.toy.adapter import AdaptedLinear, LowRank, ToyAdapter
from d9d_testing.toy.config import ToyAdapterConfig
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional


class FaultyConfig(PluginConfig):
    """Adapters with a fault."""

    name: Literal["faulty"] = "faulty"
    """Selects the method."""
    match: str = "*"
    """Which layers."""
    fault: str = ""
    """Fault of the method."""


def adapted(stage: nn.Module) -> Iterator[AdaptedLinear]:
    return (module for module in stage.modules() if isinstance(module, AdaptedLinear))


class Faulty(ToyAdapter):
    """The toy adapter; subclasses break it."""

    def __init__(self, config: FaultyConfig) -> None:
        super().__init__(ToyAdapterConfig(match=config.match))


class MergesTwice(Faulty):
    def merge(self, stage: nn.Module) -> None:
        with torch.no_grad():
            for linear in adapted(stage):
                linear.adapter.up.mul_(2)
        super().merge(stage)


class MergesNothing(Faulty):
    def merge(self, stage: nn.Module) -> None:
        with torch.no_grad():
            for linear in adapted(stage):
                linear.adapter.up.zero_()
        super().merge(stage)


class MergesTransposed(Faulty):
    def merge(self, stage: nn.Module) -> None:
        with torch.no_grad():
            for linear in adapted(stage):
                term = linear.adapter.up @ linear.adapter.down
                linear.weight.add_(term.T - term)
        super().merge(stage)


class LeavesAdaptersBehind(Faulty):
    def merge(self, stage: nn.Module) -> None:
        with torch.no_grad():
            for linear in adapted(stage):
                linear.weight.add_(linear.adapter.up @ linear.adapter.down)
                linear.adapter.up.zero_()


class TrainsBiasesUnsaid(Faulty):
    """Biases are named, although they should not be; and a term is not."""

    def inject(self, stage: nn.Module) -> frozenset[str]:
        return frozenset(name for name in super().inject(stage) if "layers.0" not in name)


class NamesWhatIsNotThere(Faulty):
    def inject(self, stage: nn.Module) -> frozenset[str]:
        return super().inject(stage) | {"layers.9.linear.adapter.down"}


class NamesWhatGetsNoGradient(Faulty):
    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        for linear in adapted(stage):
            linear.adapter.spare = nn.Parameter(torch.empty_like(linear.adapter.down))
            linear.adapter.reset_parameters = lambda a=linear.adapter: fill(a)  # type: ignore[method-assign,misc]
        return named | {name.replace("down", "spare") for name in named if name.endswith("down")}


def fill(adapter: LowRank) -> None:
    LowRank.reset_parameters(adapter)
    nn.init.zeros_(adapter.spare)  # type: ignore[arg-type]


class Renames(Faulty):
    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        layers: Any = stage.get_submodule("layers")
        layers["0"].dense = layers["0"].linear
        del layers["0"].linear
        layers["0"].forward = lambda x, b=layers["0"]: x + torch.tanh(b.dense(x))
        return frozenset(name.replace("layers.0.linear", "layers.0.dense") for name in named)


class Allocates(Faulty):
    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        for linear in adapted(stage):
            linear.adapter.down = nn.Parameter(torch.zeros(linear.adapter.down.shape))
        return named


class StartsElsewhere(Faulty):
    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        for linear in adapted(stage):
            linear.adapter.reset_parameters = lambda a=linear.adapter: both(a)  # type: ignore[method-assign,misc]
        return named


def both(adapter: LowRank) -> None:
    nn.init.normal_(adapter.down)
    nn.init.normal_(adapter.up)


class FillsNothing(Faulty):
    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        for linear in adapted(stage):
            linear.adapter.reset_parameters = lambda: None  # type: ignore[method-assign]
        return named


class MatchesNothingQuietly(Faulty):
    def inject(self, stage: nn.Module) -> frozenset[str]:
        try:
            return super().inject(stage)
        except Exception:
            return frozenset()


class ChangesTheLayer(Faulty):
    """The weight of the layer itself moves at the start."""

    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        for linear in adapted(stage):
            linear.reset_parameters = lambda one=linear: ones(one)  # type: ignore[method-assign,misc]
        return named


class DiffersBetweenRanks(Faulty):
    """Replicas drift apart from the first step on."""

    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        rank = dist.get_rank() if dist.is_initialized() else 0
        for linear in adapted(stage):
            linear.adapter.reset_parameters = lambda a=linear.adapter: by_rank(a, rank)  # type: ignore[method-assign,misc]
        return named


def by_rank(adapter: LowRank, rank: int) -> None:
    LowRank.reset_parameters(adapter)
    adapter.down.mul_(1 + rank)


class StaysOn(Faulty):
    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        yield


class StaysOff(Faulty):
    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        for linear in adapted(stage):
            linear.adapter_off = True
        yield


class ComesBackInside(Faulty):
    """The end of an inner block ends the outer one, too."""

    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        for linear in adapted(stage):
            linear.adapter_off = True
        yield
        for linear in adapted(stage):
            linear.adapter_off = False


class SwitchesOffTheFirst(Faulty):
    """Switches off the first adapted layer only."""

    @contextmanager
    def off(self, stage: nn.Module) -> Iterator[None]:
        first = next(adapted(stage))
        before = first.adapter_off
        first.adapter_off = True
        try:
            yield
        finally:
            first.adapter_off = before


class DropsOutInEvaluation(Faulty):
    """``functional.dropout`` drops out in evaluation too, unless it is told not to."""

    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        for linear in adapted(stage):
            linear.adapter.forward = lambda x, a=linear.adapter: LowRank.forward(a, functional.dropout(x, 0.1))  # type: ignore[method-assign,misc]
        return named


class PassesNoGradientOn(Faulty):
    """The update reads a detached input: earlier layers get a part of their gradient only."""

    def inject(self, stage: nn.Module) -> frozenset[str]:
        named = super().inject(stage)
        for linear in adapted(stage):
            linear.adapter.forward = lambda x, a=linear.adapter: without_gradient(a, x)  # type: ignore[method-assign,misc]
        return named


def without_gradient(adapter: LowRank, x: Tensor) -> Tensor:
    return LowRank.forward(adapter, x.detach())


def ones(linear: nn.Linear) -> None:
    for parameter in (linear.weight, linear.bias):
        nn.init.ones_(parameter)


def build(config: FaultyConfig) -> Faulty:
    """The method with the fault."""
    kinds: dict[str, type[Faulty]] = {kind.__name__: kind for kind in Faulty.__subclasses__()}
    return kinds.get(config.fault, Faulty)(config)


@hookimpl
def d9d_peft_methods() -> Iterator[PeftSpec]:
    """The faulty one."""
    yield PeftSpec(
        name="faulty",
        summary="Adapters with a fault.",
        config=Ref(f"{__name__}:FaultyConfig"),
        build=Ref(f"{__name__}:build"),
    )


class Sound(PeftSuite):
    plugin = __file__
    target = "faulty"
    matches_nothing: ClassVar = {"match": "absent"}


def _fault(kind: type[Faulty], text: str) -> tuple[dict[str, Any], str]:
    return {"config": {"fault": kind.__name__}}, text


FAULTS = {
    "merges twice": _fault(MergesTwice, "the output after merge()"),
    "merges nothing": _fault(MergesNothing, "the output after merge()"),
    "merges transposed": _fault(MergesTransposed, "the output after merge()"),
    "leaves adapters behind": _fault(LeavesAdaptersBehind, "an export must have the model's own tensors only"),
    "does not name all it adds": _fault(TrainsBiasesUnsaid, "but does not return them"),
    "names what is not there": _fault(NamesWhatIsNotThere, "which the model does not have"),
    "names what gets no gradient": _fault(NamesWhatGetsNoGradient, ""),
    "renames parameters": _fault(Renames, "parameters of the model must keep their names"),
    "allocates": _fault(Allocates, "inject() allocates"),
    "starts elsewhere": _fault(StartsElsewhere, "the output of the adapted model before any step"),
    "fills nothing": _fault(FillsNothing, "the modules that own them need reset_parameters()"),
    "matches nothing quietly": _fault(MatchesNothingQuietly, "DID NOT RAISE"),
    "differs between ranks": _fault(DiffersBetweenRanks, "fsdp 2"),
    "stays on when it is switched off": _fault(StaysOn, "the output inside off()"),
    "stays off": _fault(StaysOff, "the output after off()"),
    "comes back inside of a block": _fault(ComesBackInside, "after a second block"),
    "switches off the first layer only": _fault(SwitchesOffTheFirst, ""),
    "drops out in evaluation": _fault(DropsOutInEvaluation, ""),
    "passes no gradient on": _fault(PassesNoGradientOn, ""),
    "changes the layer itself": _fault(ChangesTheLayer, "have other initial values"),
}

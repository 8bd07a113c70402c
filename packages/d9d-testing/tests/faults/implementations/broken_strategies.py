"""A single-file plugin: data parallelism by hand, with a fault of choice. For the tests of the strategy suite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from d9d_core.config import PluginConfig
from d9d_core.errors import BuildError
from d9d_core.plugin import Ref, StrategySpec, hookimpl
from d9d_core.strategy import Applied, Collective, Communication, GradientOwner, StepShape, no_collectives
from d9d_engine.distributed.mesh import Topology
from torch import distributed as dist
from torch import nn

Fault = Literal[
    "none",
    "sums_nothing",
    "claims_and_does_not",
    "changes_numbers",
    "changes_random_numbers",
    "renames",
    "changes_shapes",
    "allocates",
    "changes_nothing",
    "invents_a_module",
    "invents_a_parameter",
    "invents_an_axis",
    "needs_few_ranks",
    "adds_state",
    "declares_no_collectives",
    "hides_a_collective",
    "invents_a_collective",
    "miscounts_a_collective",
    "sums_gradients_too",
    "acts_in_every_second_forward",
]


class ByHandConfig(PluginConfig):
    """Copies of the model."""

    name: Literal["by_hand"] = "by_hand"
    """Selects the strategy."""
    fault: Fault = "none"
    """Fault of the strategy."""


class Inner(nn.Module):
    """A block in a box."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.inner = block

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


class SumsGradients:
    """Sums a gradient over ranks, although core's synchroniser sums it again."""

    ready = False

    def __call__(self, module: nn.Module, _inputs: object) -> None:
        weight = module.get_parameter("weight")
        if not self.ready and not weight.is_meta and weight.requires_grad:
            weight.register_hook(self.summed)
            self.ready = True

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class EverySecond:
    """Changes the output of every second call, as a cache with a wrong key does."""

    calls = 0

    def __call__(self, _module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor | None:
        self.calls += not output.is_meta
        return None if self.calls % 2 else output * 1.01


def sum_zeros(*_: object) -> None:
    dist.all_reduce(torch.zeros(4))


class ByHand:
    """Changes nothing but what its fault is; core's synchroniser sums gradients without an owner."""

    def __init__(self, config: ByHandConfig) -> None:
        self._fault = config.fault

    def apply(self, stage: nn.Module, topology: Topology) -> Applied:
        gradients: list[GradientOwner] = []
        modules: tuple[str, ...] = ("",)
        collectives: Communication | None = no_collectives
        ranks = tuple(range(topology.world_size))

        def declared(step: StepShape, /) -> Sequence[Collective]:
            return [Collective("all_reduce", "dp_replicate", ranks, 16, step.forwards, "zeros")]

        layers = stage.get_submodule("layers")
        assert isinstance(layers, nn.ModuleDict)
        match self._fault:
            case "sums_nothing":
                gradients = [GradientOwner(name, "dp_replicate", "none") for name, _ in stage.named_parameters()]
            case "claims_and_does_not":
                gradients = [GradientOwner("layers.1.weight", "dp_replicate", "fsdp")]
            case "changes_numbers":
                layers["0"].register_forward_hook(lambda _module, _inputs, output: output * 1.001)
            case "changes_random_numbers":
                layers["0"].register_forward_pre_hook(lambda *_: torch.rand(1) and None)
            case "renames":
                layers["0"] = Inner(layers["0"])
            case "changes_shapes":
                layers["0"].weight = nn.Parameter(torch.empty(3, 6, device="meta"))
            case "allocates":
                layers["0"].to_empty(device="cpu")
            case "changes_nothing":
                modules = ()
            case "invents_a_module":
                modules = ("layers.0", "layers.9")
            case "invents_a_parameter":
                gradients = [GradientOwner("layers.0.bias", "dp_replicate", "sync")]
            case "invents_an_axis":
                gradients = [GradientOwner("layers.0.weight", "dp", "sync")]
            case "needs_few_ranks":
                if topology.world_size > 8:
                    raise BuildError("no more than 8 ranks")
            case "adds_state":
                stage.register_buffer("calls", torch.empty(1, device="meta"))
            case "declares_no_collectives":
                collectives = None
            case "hides_a_collective":
                layers["0"].register_forward_hook(sum_zeros)
            case "invents_a_collective":
                collectives = declared
            case "miscounts_a_collective":
                layers["0"].register_forward_hook(sum_zeros)
                layers["1"].register_forward_hook(sum_zeros)
                collectives = declared
            case "sums_gradients_too":
                layers["0"].register_forward_pre_hook(SumsGradients())
            case "acts_in_every_second_forward":
                layers["0"].register_forward_hook(EverySecond())
            case _:
                layers["0"].register_forward_hook(lambda *_: None)
        return Applied(modules, tuple(gradients), collectives=collectives)


@hookimpl
def d9d_strategies() -> Iterator[StrategySpec]:
    yield StrategySpec(
        name="by_hand",
        summary="Copies of the model.",
        config=Ref(f"{__name__}:ByHandConfig"),
        build=Ref(f"{__name__}:ByHand"),
        requires={"model:blocks"},
        anchor="data",
        axes=frozenset({"dp_replicate"}),
    )
